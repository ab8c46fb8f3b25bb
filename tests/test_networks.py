"""The network experiments under faults: killed at random moments, a run ends with the numbers of one that was not."""
import os
import random
import subprocess
import sys
import time

import pandas as pd
import pytest

from fact_nb.store import Store

SMALL = ["--preset", "cpu", "--quiet", "--set", "datasets=digits", "--set", "seeds=2", "--set", "n=200", "--set", "width=16", "--set", "hidden=2"]
RUNS = dict(depth=["run", "depth", *SMALL, "--set", "at_paper=", "--set", "epochs=150", "--set", "polish=600"],
            epochs=["run", "epochs", *SMALL, "--set", "layers=2", "--set", "epochs=120", "--set", "looks=60"])


def rows(folder, name):
    store = Store(folder / "results")
    (label,) = store.labels(name)
    return store.load(name, label).df


@pytest.mark.parametrize("name", sorted(RUNS))
def test_killed_at_random_moments_and_resumed_gives_the_same_numbers(fact, tmp_path, name):
    started = time.monotonic()
    done = fact(*RUNS[name])
    whole_time = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    whole = rows(tmp_path, name)
    (tmp_path / "results").rename(tmp_path / "whole")
    rng, inside, killed = random.Random(7), 0, 0
    while killed < 3 or not inside:                                           # at least one kill must fall inside a unit, with a checkpoint on disk
        p = subprocess.Popen([sys.executable, "-m", "fact_nb", *RUNS[name]], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ, OMP_NUM_THREADS="1"))
        time.sleep(rng.uniform(.2, .9) * whole_time / 2)
        if p.poll() is not None: break
        p.kill(); p.wait(); killed += 1
        inside += any((tmp_path / "results").rglob("*.pt"))
    assert killed and inside, "it was never killed in the middle of a unit"
    assert fact(*RUNS[name]).returncode == 0
    pd.testing.assert_frame_equal(rows(tmp_path, name), whole)
    assert not any((tmp_path / "results").rglob("*.pt"))                      # checkpoints go when the unit is stored
