"""What the tests share: running the command line as a user does, in a process of its own."""
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that: the tests that interrupt a process would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path, config):
    "A simulated device can be made once a process: its tests run when their folder is named."
    if collection_path != ROOT / "tests" / "device": return None
    named = [Path(str(a).split("::")[0]).resolve() for a in config.invocation_params.args]
    return not any(p == collection_path or collection_path in p.parents for p in named)


@pytest.fixture
def fact(tmp_path):
    "Call `fact …` in an empty folder; returns the finished process."
    def call(*args, **kw):
        env = dict(os.environ, OMP_NUM_THREADS="1", **kw.pop("env", {}))
        env.pop("FACT_RESULTS", None)
        return subprocess.run([sys.executable, "-m", "fact_nb", *args], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, **kw)
    return call
