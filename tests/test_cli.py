"""The command line, as a newcomer meets it."""
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# the smallest run with several units: two scan points, one trend point, the closed form, the lemmas
SMALL = ["run", "separation", "--set", "ps=1e-5", "--set", "lams=1e-5,1e-6", "--set", "eps=.8", "--seeds", "1", "--quiet"]
LABEL = "quick+ps=1e-05+lams=1e-05-1e-06+seeds=1+eps=0.8"
FOLDER = "quick+seeds=1"     # of its units: the other fields only decide which units there are


def test_help_and_list_read_well(fact):
    out = fact("--help").stdout
    assert all(word in out for word in ("list", "run", "report", "data", "bench", "a first session"))
    out = fact("list").stdout
    assert "separation" in out and "fact run NAME" in out


@pytest.mark.parametrize("argv, says", [
    (["run", "nonsense"], "unknown experiment 'nonsense'; there are:"),
    (["run", "separation", "--preset", "huge"], "there are: quick, cpu, paper"),
    (["run", "separation", "--set", "depth=3"], "valid fields: tau, ps"),
    (["run", "separation", "--set", "width=many"], "width must be a whole number"),
    (["run", "separation", "--set", "lams=-1e-5"], "lams must be positive"),
    (["run", "separation", "--set", "tau=nan"], "tau must be a number"),
    (["run", "separation", "--device", "quantum"], "unknown device 'quantum'"),
    (["run"], "NAME"),
    (["report", "--out", "/dev/null/x"], "cannot be written"),
])
def test_bad_input_is_one_line_and_exit_code_2(fact, argv, says):
    done = fact(*argv)
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_run_report_and_json(fact, tmp_path):
    assert fact(*SMALL).returncode == 0
    assert (tmp_path / "results" / "separation" / f"{LABEL}.json").exists()
    done = fact("run", "separation", "--set", "seeds=1", "--quiet", "--results", "there")
    assert done.returncode == 0 and "sep-fact-holds" in done.stdout
    assert (tmp_path / "there" / "separation" / "quick+seeds=1.json").exists()


def test_overrides_change_the_outcome_and_stay_apart(fact, tmp_path):
    rows = {}
    for width in ("7", "12"):
        done = fact(*SMALL, "--set", f"width={width}")
        assert done.returncode == 0, done.stderr
    for p in (tmp_path / "results" / "separation").glob("*.json"):
        unit = json.loads((p.parent / json.loads(p.read_text())["folder"] / "part=scan,p=1e-05,lam=1e-06.json").read_text())
        rows[p.name] = unit["rows"][0]["grad_norm"]
    assert len(rows) == 2 and len(set(rows.values())) == 2


def test_quick_opens_no_socket(tmp_path):
    code = ("import socket, sys\n"
            "def no(*a, **k): raise SystemExit('a socket was opened')\n"
            "socket.socket.connect = no; socket.socket.bind = no; socket.create_connection = no; socket.getaddrinfo = no\n"
            "from fact_nb.cli import main\nmain(['run', 'all', '--quiet'])\nmain(['report'])\n")
    env = dict(os.environ, OMP_NUM_THREADS="1"); env.pop("FACT_DATA", None)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=env, timeout=900)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report" / "index.html").stat().st_size > 20_000
    assert "this machine:" in done.stdout


def results(tmp_path: Path) -> dict:
    "Rows of every stored unit, without what may differ between two runs."
    return {p.name: json.loads(p.read_text())["rows"] for p in sorted((tmp_path / "results" / "separation" / FOLDER).glob("*.json"))}


def test_ctrl_c_leaves_a_consistent_store(fact, tmp_path):
    p = subprocess.Popen([sys.executable, "-m", "fact_nb", *SMALL], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
    folder = tmp_path / "results" / "separation" / FOLDER
    for _ in range(600):
        if list(folder.glob("*.json")): break
        time.sleep(.05)
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=60)
    assert p.returncode == 130 and "every finished unit is kept" in err and "Traceback" not in err
    kept = results(tmp_path)
    assert kept and not list(folder.glob(".*"))                       # whole units, no temporary files
    assert not (tmp_path / "results" / "separation" / f"{LABEL}.json").exists()
    assert fact(*SMALL, "--resume").returncode == 0
    after = results(tmp_path)
    assert all(after[k] == v for k, v in kept.items()) and len(after) == 5


def test_kill_at_random_moments_and_resume_gives_the_same(fact, tmp_path):
    assert fact(*SMALL).returncode == 0
    whole = results(tmp_path)
    for p in (tmp_path / "results").rglob("*.json"): p.unlink()
    for p in (tmp_path / "results").rglob("*.npz"): p.unlink()
    rng = random.Random(0)
    for _ in range(3):
        p = subprocess.Popen([sys.executable, "-m", "fact_nb", *SMALL, "--resume"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ, OMP_NUM_THREADS="1"))
        time.sleep(rng.uniform(2, 9))
        p.kill(); p.wait()
    done = fact(*SMALL, "--resume")
    assert done.returncode == 0, done.stderr
    assert results(tmp_path) == whole


def test_a_corrupted_result_is_named_and_set_aside(fact, tmp_path):
    assert fact("run", "separation", "--set", "seeds=1", "--quiet").returncode == 0
    label = "quick+seeds=1"
    folder = tmp_path / "results" / "separation"
    (folder / f"{label}.json").rename(folder / "quick.json")                                    # as if it were the quick result itself
    unit = folder / label / "part=limit.json"
    unit.write_text(unit.read_text().replace("0.", "1.", 3))
    done = fact("report")
    assert done.returncode == 0
    assert "part=limit.json is damaged" in done.stderr and "set aside as part=limit.json.corrupt-1" in done.stderr
    assert "separation/quick" not in fact("report", "--json").stdout          # not silently used
    assert (folder / label / "part=limit.json.corrupt-1").exists()
