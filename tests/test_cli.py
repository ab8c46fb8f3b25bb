"""The command line, as a newcomer meets it."""
import fcntl
import json
import os
import pty
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

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
    (["run", "separation", "--set", "seeds=99999999999999999999"], "seeds=99999999999999999999 is too large: at most 100,000 is possible"),
    (["run", "theorem", "--seeds", "100000"], "these settings make 500,000 units of work, at most 100,000 are possible: take fewer seeds"),
    (["run", "depth", "--set", "hidden=1000000000"], "hidden=1000000000 is too large: at most 10,000 is possible"),
    (["run", "separation", "--set", "width=1000000000"], "width=1000000000 needs at least 60 GB of memory, this machine has"),
    (["run", "deep_linear", "--set", "depths=3", "--set", "width=1000000"], "L=3,seed=0,epochs=200 needs more memory than there is: choose smaller settings"),
    (["run", "separation", "--results", "/dev/null"], "/dev/null (it is not a folder): choose another folder with --results"),
    (["run", "separation", "--results", "/proc/no/such"], "results cannot be written to /proc/no/such"),
    (["report", "--results", "missing"], "there is no folder missing: run an experiment first"),
    (["report", "--results", "/dev/null"], "/dev/null is not a folder"),
    (["report", "--results", "/etc"], "/etc holds no results of any experiment"),
    (["completion", "tcsh"], "invalid choice: 'tcsh'"),
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
            "from fact_nb.lab.cli import main\nmain(['run', 'all', '--quiet'])\nmain(['report'])\n")
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
    assert all(after[k] == v for k, v in kept.items()) and len(after) == 6


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


def timed(*args, cwd) -> tuple[subprocess.CompletedProcess, float]:
    "`fact …` with its CPU seconds."
    spent = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    before = spent()
    done = subprocess.run([sys.executable, "-m", "fact_nb", *args], cwd=cwd, capture_output=True, text=True)
    return done, spent() - before


@pytest.mark.parametrize("argv, code", [(["list"], 0), (["completion", "bash"], 0), (["run", "nonsense"], 2), (["run", "separation", "--preset", "huge"], 2), (["run", "separation", "--workers", "0"], 2),
                                        (["run", "separation", "--oops"], 2), (["bench", "nonsense"], 2), (["data", "nonsense"], 2), (["report", "--results", "missing"], 2)])
def test_a_list_and_an_error_answer_within_a_second(tmp_path, argv, code):
    done, seconds = timed(*argv, cwd=tmp_path)
    assert done.returncode == code and seconds < 1, (seconds, done.stderr)


UNIT = re.compile(r"  separation part=\S+: \d+\.\d s, (\d) of 6")


def test_a_log_has_one_line_for_each_unit_and_no_bars(fact):
    loud = fact(*(w for w in SMALL if w != "--quiet"))
    assert loud.returncode == 0 and loud.stderr == "" and "\r" not in loud.stdout
    assert [m[1] for line in loud.stdout.splitlines() if (m := UNIT.fullmatch(line))] == list("123456")
    quiet = fact(*SMALL)
    assert not any(UNIT.fullmatch(line) for line in quiet.stdout.splitlines())
    judged = lambda out: [line for line in out.splitlines() if line.startswith("  sep-")]
    assert judged(quiet.stdout) == judged(loud.stdout) and len(judged(loud.stdout)) == 11          # every claim, also those that this size cannot decide
    assert any("too small to judge" in line for line in judged(loud.stdout))
    assert all(re.match(r"  \S+ +(holds|differs|too small)", line).start(1) == 29 for line in judged(loud.stdout))            # aligned


def in_terminal(*args, cwd, columns=100) -> str:
    "What `fact …` shows in a terminal."
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    p = subprocess.Popen([sys.executable, "-m", "fact_nb", *args], cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, env=dict(os.environ, OMP_NUM_THREADS="1"))
    os.close(theirs)
    shown = b""
    while True:
        try: part = os.read(ours, 4096)
        except OSError: break               # the other end was closed
        if not part: break
        shown += part
    os.close(ours)
    assert p.wait(60) == 0
    return shown.decode()


def test_a_terminal_has_bars_and_aligned_verdicts(tmp_path):
    shown = in_terminal(*(w for w in SMALL if w != "--quiet"), cwd=tmp_path)
    assert "%|" in shown and not UNIT.search(shown)
    verdicts = shown[shown.index("  sep-"):].split("  stored in")[0].splitlines()
    assert all(len(line.rstrip()) <= 100 for line in verdicts)
    assert {line.index(line.strip()) for line in verdicts if line.strip()} == {2, 49}            # a claim, or the rest of a value in its own column
    assert "%|" not in in_terminal(*SMALL, cwd=tmp_path)


def test_everything_stored_is_said_and_nothing_is_written(fact, tmp_path):
    shutil.copytree(ROOT / "results" / "separation", tmp_path / "results" / "separation")
    files = lambda: {p: p.stat().st_mtime_ns for p in (tmp_path / "results").rglob("*")}
    before = files()
    done = fact("run", "separation", "--preset", "cpu")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "--no-resume" in line]
    assert len(said) == 1 and re.search(r"nothing to do: all \d+ units are stored already", said[0])
    assert "sep-fact-holds" in done.stdout and files() == before


def test_a_full_disk_loses_no_unit(fact, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode: pytest.skip("only root can mount a small disk")
    try:
        done = fact("run", "separation", "--seeds", "1", "--results", str(disk / "results"))
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        kept = Path(re.search(r"No space left on device\): it is kept in ([^;]+); make room, then: (cp -r .+/') and run it again with --resume", done.stderr)[1])
        stored = {p.name for p in disk.rglob("*.json")}
        rescued = {p.name for p in kept.rglob("*.json")}
        assert stored and len(rescued) == 1 and not stored & rescued
        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        subprocess.run(re.search("cp -r .+/'", done.stderr)[0], shell=True, check=True)
        again = fact("run", "separation", "--seeds", "1", "--results", str(disk / "results"), "--resume")
        assert again.returncode == 0 and not any(name.removesuffix(".json") + ":" in again.stdout for name in stored | rescued)
        shutil.rmtree(kept)
    finally: subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_one_line(tmp_path):
    with open("/dev/full", "w") as full: done = subprocess.run([sys.executable, "-m", "fact_nb", "list"], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "fact: No space left on device\n")


def completed(fact, tmp_path, shell: str, command: str) -> list[str]:
    "What a shell offers at the Tab key."
    if shutil.which(shell) is None: pytest.skip(f"{shell} is not installed")
    script = tmp_path / f"completion.{shell}"
    script.write_text(fact("completion", shell).stdout)
    words = command.split(" ")
    typed = " ".join(w or "''" for w in words)
    code = {"bash": f"source {script}; complete -p fact >/dev/null || exit 3; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _fact; echo \"${{COMPREPLY[@]}}\"",
            "fish": f"source {script}; complete -C '{command}' | cut -f 1"}[shell]
    done = subprocess.run([shell, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_the_tab_key_completes(fact, tmp_path, shell):
    offered = lambda command: completed(fact, tmp_path, shell, command)
    assert offered("fact run sep") == ["separation"]
    assert set(offered("fact ")) >= {"list", "run", "report", "data", "bench", "completion"}
    assert sorted(offered("fact run separation --preset ")) == ["cpu", "paper", "quick"]
    assert offered("fact data mn") == ["mnist"]


def test_a_real_bash_completes_at_the_tab_key(fact, tmp_path):
    "An interactive shell, typed into."
    (tmp_path / "rc").write_text(fact("completion", "bash").stdout + "\nfact() { echo got \"$@\"; }\n")
    ours, theirs = pty.openpty()
    p = subprocess.Popen(["bash", "--noprofile", "--rcfile", tmp_path / "rc", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, start_new_session=True)
    os.close(theirs)
    os.write(ours, b"fact run sep\t --pres\tcpu\nexit\n")
    shown = b""
    while True:
        try: part = os.read(ours, 4096)
        except OSError: break
        if not part: break
        shown += part
    p.wait(60)
    os.close(ours)
    assert b"got run separation --preset cpu" in shown, shown


def test_zsh_reads_the_script(fact, tmp_path):
    if shutil.which("zsh") is None: pytest.skip("zsh is not installed")
    (tmp_path / "c").write_text(fact("completion", "zsh").stdout)
    done = subprocess.run(["zsh", "-f", "-c", "source ./c && whence _fact"], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "_fact", done.stderr
