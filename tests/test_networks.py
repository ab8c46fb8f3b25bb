"""The network experiments under faults: killed at random moments, a run ends with the numbers of one that was not."""
import os
import random
import subprocess
import sys
import time

import pandas as pd
import pytest

from fact_nb.lab.store import Store

SMALL = ["--preset", "cpu", "--quiet", "--set", "datasets=digits", "--set", "seeds=2", "--set", "n=200", "--set", "width=16", "--set", "hidden=2"]
RUNS = dict(depth=["run", "depth", *SMALL, "--set", "at_paper=", "--set", "epochs=100", "--set", "polish=300", "--set", "window=200"],
            epochs=["run", "epochs", *SMALL, "--set", "layers=2", "--set", "epochs=100", "--set", "looks=50"])


def rows(folder, name):
    store = Store(folder / "results")
    (label,) = store.labels(name)
    return store.load(name, label).df


def modified(f):
    "When a checkpoint was written; 0 where it has just been removed."
    try:
        return f.stat().st_mtime
    except FileNotFoundError:
        return 0.


@pytest.mark.parametrize("name", sorted(RUNS))
def test_killed_at_random_moments_and_resumed_gives_the_same_numbers(fact, tmp_path, name):
    done = fact(*RUNS[name])
    assert done.returncode == 0, done.stderr
    whole = rows(tmp_path, name)
    (tmp_path / "results").rename(tmp_path / "whole")
    rng, killed = random.Random(7), 0
    for _ in range(3):                                                        # each kill falls inside a unit, a random while after a checkpoint was written
        began = time.time()
        p = subprocess.Popen([sys.executable, "-m", "fact_nb", *RUNS[name]], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ, OMP_NUM_THREADS="1"))
        while p.poll() is None and not any(modified(f) > began for f in (tmp_path / "results").rglob("*.pt")): time.sleep(.02)
        time.sleep(rng.uniform(0, .5))
        if p.poll() is None: p.kill(); killed += 1
        p.wait()
    assert killed, "it was over before it could be killed"
    assert fact(*RUNS[name]).returncode == 0
    pd.testing.assert_frame_equal(rows(tmp_path, name), whole)
    assert not any((tmp_path / "results").rglob("*.pt"))                      # checkpoints go when the unit is stored
