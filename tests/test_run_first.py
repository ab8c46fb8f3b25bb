"""What `fact run` says before it works, what it asks, and what it does when one experiment fails."""
import dataclasses
import os
import pty
import sys
from types import SimpleNamespace

import pytest
import torch

from fact_nb.lab import cli, workers
from fact_nb.lab.experiment import Output, UsageError, find, registry
from fact_nb.lab.needs import Work
from fact_nb.lab.workers import plan_run, why_on_cpu


def test_a_long_run_without_a_terminal_is_refused_in_one_line(fact):
    done = fact("run", "parity", "--preset", "paper")
    assert done.returncode == 2 and "155 of 155 units to do" in done.stdout
    assert "about" in done.stdout and "GB at once" in done.stdout
    assert len(done.stderr.strip().splitlines()) == 1 and "--yes" in done.stderr


def test_a_short_run_is_not_asked_about(fact):
    done = fact("run", "kernel_theory", "--preset", "cpu", "--set", "seeds=1")
    assert done.returncode == 0 and "on cpu: about" in done.stdout


def in_terminal(answer, *args):
    "Run `fact` in a terminal of its own and answer its question."
    pid, terminal = pty.fork()
    if pid == 0: os.execvp(sys.executable, [sys.executable, "-m", "fact_nb", *args])
    seen = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError: break
        if not part: break
        seen += part
        if b"[y/N]" in part: os.write(terminal, answer)
    return seen.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_the_question_can_be_declined(tmp_path):
    seen, code = in_terminal(b"n\n", "run", "parity", "--preset", "paper", "--results", str(tmp_path))
    assert "go on? [y/N]" in seen and "not run" in seen and code == 2
    assert not list(tmp_path.iterdir())


def asked(seconds, monkeypatch, answer=None, yes=False):
    "What `_agree` does, in a terminal with this answer or without one."
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: answer is not None))
    monkeypatch.setattr("builtins.input", lambda text: answer)
    cli._agree(seconds, SimpleNamespace(yes=yes))


def test_agreement(monkeypatch):
    asked(3599, monkeypatch)
    asked(1e6, monkeypatch, yes=True)
    asked(1e6, monkeypatch, answer="y")
    for answer in (None, "", "n"):
        with pytest.raises(UsageError): asked(1e6, monkeypatch, answer)


def test_keep_going_names_the_failure_and_runs_the_rest(tmp_path, monkeypatch, capsys):
    broken = lambda cfg, unit, ctx: 1 / 0
    good = find("kernel_theory")
    bad = dataclasses.replace(good, name="separation", run_unit=broken)
    both = dict(separation=bad, kernel_theory=good)
    monkeypatch.setattr(cli, "registry", lambda: both)
    args = ["run", "all", "--results", str(tmp_path), "--quiet"]
    with pytest.raises(ZeroDivisionError): cli.main(args)
    assert not (tmp_path / "kernel_theory").exists()
    with pytest.raises(SystemExit): cli.main([*args, "--keep-going"])
    err = capsys.readouterr().err
    assert "separation failed: ZeroDivisionError" in err and "1 of 2 failed: separation" in err
    assert (tmp_path / "kernel_theory" / "quick.json").exists()


def test_cpu_work_is_recorded_as_the_cpu_s(tmp_path, monkeypatch):
    "Whatever device the run was given; with the reason."
    exp = find("theorem")
    plan = plan_run(exp, "quick", ["iters=5"], tmp_path)
    monkeypatch.setattr(workers, "device_for", lambda name, wide=False: torch.device("cuda"))
    workers.carry_out(plan, "cuda", progress=False)
    made = plan.store.read_unit("theorem", plan.folder, "net=proof,seed=0")["provenance"]
    assert made["device"] == "cpu" and "small" in made["cpu_only"]


def test_a_device_without_float64_is_passed_over_or_refused(tmp_path):
    mps, parity = torch.device("mps"), find("parity")
    plan = plan_run(parity, "quick", results=tmp_path)
    assert "no" not in why_on_cpu(parity, plan.cfg, plan.todo[0], torch.device("cpu"))
    assert "float64" in why_on_cpu(parity, plan.cfg, plan.todo[0], mps)
    with pytest.raises(UsageError, match="cannot compute on mps.*--device auto"):
        workers.check_precision(plan, "mps", mps)
    workers.check_precision(plan, "auto", mps)
    depth = find("depth")
    assert why_on_cpu(depth, depth.preset("quick"), depth.units(depth.preset("quick"))[0], mps) == ""


def test_a_unit_of_another_device_is_not_reused(tmp_path):
    exp = find("kernel_theory")
    exp.run("cpu", overrides=["seeds=1", "kernels=laplace"], results=tmp_path, progress=False)
    todo = lambda made_on: len(plan_run(exp, "cpu", ["seeds=1", "kernels=laplace"], tmp_path,
                                        made_on=made_on).todo)
    assert todo(None) == 0 < todo("NVIDIA H100")


def fake_work(job):
    import time
    time.sleep(.05)
    return workers.Made(dict(unit=job.unit, device=job.device, process=os.getpid()), {})


def test_one_process_for_each_device():
    "Every unit is done once; a process keeps to its device; CPU work stays the CPU's."
    jobs = [workers.Job(None, None, dict(seed=i), "", "cuda") for i in range(6)]
    jobs += [workers.Job(None, None, dict(seed=6), "", "cpu", cpu_only="small")]
    made = [m.record for m in workers._on_devices(jobs, ["cuda:0", "cuda:1"], fake_work)]
    assert sorted(m["unit"]["seed"] for m in made) == list(range(7))
    homes = {(m["process"], m["device"]) for m in made if m["device"] != "cpu"}
    assert len(homes) == 2 == len({d for _, d in homes})
    assert [m["device"] for m in made if m["unit"]["seed"] == 6] == ["cpu"]


def test_a_unit_counts_the_seconds_of_all_its_attempts(tmp_path):
    from fact_nb.lab.workers import Job, Stopwatch, _work
    (tmp_path / "seconds.txt").write_text("100.0")
    def unit(cfg, unit, ctx): return Output([dict(a=1)])
    cfg = registry()["kernel_theory"].preset("quick")
    made = _work(Job(unit, cfg, dict(seed=0), str(tmp_path), "cpu")).record["provenance"]
    assert 100 <= made["seconds"] < 110
    assert Stopwatch(tmp_path / "new").before == 0


def test_the_bar_is_weighted_by_the_work():
    exp = find("parity")
    cfg = exp.preset("paper")
    costs = sorted((exp.cost(cfg, u) for u in exp.units(cfg)), reverse=True)
    assert sum(costs[:3]) > .85 * sum(costs)
    assert isinstance(exp.work(cfg, exp.units(cfg)[0]), Work)
