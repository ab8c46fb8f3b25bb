"""Committed results can be made again: one unit of each is rerun and compared."""
import json
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fact_nb.lab.cli import main
from fact_nb.runtime import device
from fact_nb.data.cache import available
from fact_nb.lab.experiment import Context, find, plain, registry
from fact_nb.lab.scorecard import COMMITTED, HERE, UNKNOWN, as_text, gather, origin, scorecard, verdict_of
from fact_nb.lab.store import DamagedResult, Store, made_here, read_record, sign, unit_key, write_record

ROOT = Path(__file__).resolve().parent.parent
# per experiment: a unit that takes seconds, the columns that must agree, and for networks trained by SGD, whose steps differ from one processor to the next, how closely and in which rows
FACT_ROWS = lambda **at: lambda row: row.get("quantity") in ("FACT", "bFACT") and all(row[k] == v for k, v in at.items())
CHEAP = dict(depth=("dataset=digits,setting=quick,seed=0", ["pearson"], .02, FACT_ROWS(stage="window")),
             epochs=("dataset=digits,schedule=quick,seed=0", ["pearson"], .03, FACT_ROWS(share=1.)),
             phase_transition=("learner=quick,seed=0", ["accuracy"]),
             stable=("task=parity2,ridge=0.1,seed=0", ["objective", "accuracy"], 1e-4, lambda row: row["update"] != "plain" and row["iter"] <= 10),
             motion=("part=flow,rate=0.1", ["pearson", "change", "r", "r_change"]),
             no_decay=("part=empty,seed=0", ["off", "r", "pearson"]),
             tabular=("protocol=published,table=iris", ["accuracy", "validation", "ridge", "normalised", "iterate"]),
             separation=("part=scan,p=1e-05,lam=1e-06", ["FACT", "AGOP^1", "AGOP^0.5", "eNFA", "stable_rank", "loss"]),
             deep_linear=("L=3,seed=1,noise=128-125", ["fact", "r", "r_power"]),
             grokking=("op=random,kernel=quadratic", ["errors", "test_acc"]),
             kernel_theory=("part=converse", ["value"]),
             similarity=("task=parity,kernel=quadratic,method=fact,seed=0", ["r2", "centred", "ranks", "objective"]),
             parity=("part=learn,k=2,n=500,method=fact,seed=0", ["accuracy", "mse", "trace_share", "frob_share"]),
             theorem=("net=conv,loss=ce,seed=0", ["r", "r_sqrt", "br", "r_before", "r_agop", "enfa_fact", "norm"]))


@pytest.mark.parametrize("name", sorted(CHEAP))
def test_one_unit_of_the_committed_result_is_reproduced(name, tmp_path):
    if name == "tabular" and not available("uci"): pytest.skip("the UCI corpus is not on this machine: no unit of tabular was run again")
    key, columns, atol, counts = (*CHEAP[name], 1e-5, lambda row: True)[:4] if len(CHEAP[name]) == 2 else CHEAP[name]
    stored = read_record(ROOT / "results" / name / "cpu" / f"{key}.json")
    assert stored is not None, f"no committed result of {name}; run: fact run {name} --preset cpu"
    exp = registry()[name]
    cfg = exp.presets["cpu"]
    unit = next(u for u in exp.units(cfg) if plain(u) == stored["unit"])
    rows = exp.run_unit(cfg, unit, Context(device("cpu"), tmp_path, progress=False)).rows
    assert len(rows) == len(stored["rows"])
    pairs = [(new, old) for new, old in zip(rows, stored["rows"]) if counts(old)]
    assert pairs and any(c in old for _, old in pairs for c in columns)
    for new, old in pairs:
        for c in columns:
            if c in old: assert np.isclose(new[c], old[c], atol=1e-4 if c == "ranks" else atol), (c, new[c], old[c])      # near ties are ranked by the processor's rounding


def test_every_committed_result_loads_and_is_judged():
    store = Store(ROOT / "results")
    for name, exp in registry().items():
        r = store.load(name, "cpu")
        if r is None: continue
        assert {j: f(r) for j, f in exp.judges.items()}


def test_committed_results_carry_provenance():
    for p in (ROOT / "results").glob("*/cpu.json"):
        rec = json.loads(p.read_text())
        assert {"torch", "device", "seconds", "peak_memory", "commits", "date"} <= set(rec["provenance"]), p


@pytest.mark.parametrize("whole", sorted((ROOT / "results").glob("*/*.json")), ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_committed_file_is_whole_and_where_it_belongs(whole):
    "All of it is JSON, checksums hold, and a unit lies under the key of its own parameters."
    with warnings.catch_warnings():
        warnings.simplefilter("error", DamagedResult)
        record = read_record(whole)
        if whole.parent.name in ("bench", "integrations"): return          # no units
        units = {k: read_record(whole.parent / record.get("folder", whole.stem) / f"{k}.json") for k in record["units"]}
    assert record["experiment"] == whole.parent.name and record["label"] == whole.stem
    assert units and None not in units.values()
    assert {k: unit_key(u["unit"]) for k, u in units.items()} == {k: k for k in units}


def test_every_committed_unit_belongs_to_a_whole():
    for folder in (p for p in (ROOT / "results").glob("*/*") if p.is_dir()):
        listed = {k for w in folder.parent.glob("*.json") for k in read_record(w).get("units", ())}
        assert {p.name.removesuffix(".json") for p in folder.glob("*.json")} <= listed, folder


@pytest.mark.parametrize("git_is_there", [True, False])
def test_a_report_reads_each_file_once_and_asks_each_judge_once(tmp_path, monkeypatch, capsys, git_is_there):
    asked, read, real = Counter(), Counter(), Path.read_bytes
    def counted(exp, id, judge):
        def ask(r):
            asked[exp.name, id, r.label] += 1
            return judge(r)
        return ask
    def counting(path):
        if path.is_relative_to(ROOT / "results"): read[path] += 1
        return real(path)
    exps = {n: replace(e, figures={}, judges={id: counted(e, id, j) for id, j in e.judges.items()}) for n, e in registry().items()}
    monkeypatch.setattr("fact_nb.lab.cli.registry", lambda: exps)
    monkeypatch.setattr(Path, "read_bytes", counting)
    if not git_is_there: monkeypatch.setenv("PATH", str(tmp_path))
    main(["report", "--results", str(ROOT / "results"), "--out", str(tmp_path / "index.html")])
    assert (tmp_path / "index.html").exists() and "fact-theorem" in capsys.readouterr().out
    assert len(read) > 1000 and max(read.values()) == 1
    assert {(e.name, id) for e in exps.values() for id in e.judges} <= {k[:2] for k in asked} and max(asked.values()) == 1


def git(folder, *args):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *args], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repo(tmp_path):
    "A repository with one committed result and one that is not."
    store = Store(tmp_path / "results")
    for label in ("cpu", "quick"): write_record(store.whole_path("theorem", label), dict(label=label, units=[], config={}, provenance={}))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "results/theorem/cpu.json")
    git(tmp_path, "commit", "-qm", "x")
    return store


def origins(store): return origin(store, "theorem", "cpu"), origin(store, "theorem", "quick")


def test_git_says_what_is_committed(repo):
    assert origins(repo) == (COMMITTED, HERE)
    write_record(repo.whole_path("theorem", "cpu"), dict(label="cpu", units=[], config=dict(a=1), provenance={}))
    assert origins(repo) == (HERE, HERE)


def test_where_git_cannot_tell_the_origin_is_unknown(repo, tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        m.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")                 # "dubious ownership"
        assert origins(repo) == (UNKNOWN, UNKNOWN)
        sign(repo, "theorem", "quick")
        assert origins(repo) == (UNKNOWN, HERE)                           # its own run is known all the same
    with monkeypatch.context() as m:
        m.setenv("PATH", str(tmp_path))                                   # no git
        assert origins(repo) == (UNKNOWN, HERE)
    (tmp_path / ".git").rename(tmp_path / "elsewhere")                    # an archive without its repository
    assert origins(repo) == (UNKNOWN, HERE)


@pytest.mark.parametrize("status, says", [(0, COMMITTED), (1, HERE), (128, UNKNOWN), (129, UNKNOWN)])
def test_git_is_asked_by_exit_status_and_not_by_its_words(repo, tmp_path, monkeypatch, status, says):
    (tmp_path / "git").write_text(f"#!/bin/sh\necho 'schwerwiegend: kein Git-Repository' >&2\nexit {status}\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert origin(repo, "theorem", "cpu") == says


def test_a_copied_folder_is_not_taken_for_this_machines(repo, monkeypatch):
    sign(repo, "theorem", "quick")
    assert made_here(repo, "theorem", "quick")
    monkeypatch.setattr("platform.node", lambda: "another")
    assert not made_here(repo, "theorem", "quick")


@pytest.mark.parametrize("given", [True, False])
def test_committed_results_are_found_from_anywhere(tmp_path, monkeypatch, given):
    "With FACT_RESULTS and without it, from a folder that has none."
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FACT_RESULTS", raising=False)
    if given: monkeypatch.setenv("FACT_RESULTS", str(ROOT / "results"))
    row = next(r for r in scorecard(experiments=dict(theorem=find("theorem"))) if r["id"] == "fact-theorem")
    where = origin(Store(ROOT / "results"), "theorem", "cpu")
    assert where != HERE and verdict_of(row, where)["verdict"] == "holds" and verdict_of(row, where)["result"] == "theorem/cpu"


def test_what_was_run_here_stands_beside_what_is_committed(tmp_path):
    "Values of both, what is too small, and a run with a changed setting, as such; on the terminal and on the page."
    env = dict(os.environ, OMP_NUM_THREADS="1", FACT_RESULTS=str(tmp_path / "mine"))
    fact = lambda *a: subprocess.run([sys.executable, "-m", "fact_nb", *a], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert fact("run", "theorem", "--quiet").returncode == 0
    assert fact("run", "theorem", "--quiet", "--set", "lam=0.002").returncode == 0
    only = dict(theorem=find("theorem"))
    runs = gather(tmp_path / "mine", only)
    assert [(r.origin, r.result.label) for r in runs["theorem"]][1:] == [(HERE, "quick"), (HERE, "quick+lam=0.002")] and runs["theorem"][0].result.label == "cpu"
    rows = scorecard(runs=runs, experiments=only)
    text = as_text(rows, 200)
    block = re.search(r"^fact-theorem .*\n( .*\n)+", text, re.M)[0].splitlines()
    assert re.search("(committed|unknown origin) +holds +3 seeds · ≤ .* over 120 matrices", block[0])
    assert re.search("^ +this machine +holds +(1 seed · )?≤ .* over 14 matrices", block[1]) and re.search(r"^ +this machine \* +holds +\[quick\+lam=0.002\] (1 seed · )?≤ ", block[2])
    assert re.search("^ +this machine +too small to judge", re.search(r"^fact-any-matrix .*\n( .*\n)+", text, re.M)[0], re.M)
    assert "* with changed settings (--set): not counted" in text
    from fact_nb.lab.report import build
    page = build(experiments=only, runs=runs, rows=rows)
    figure = re.search(r"<figure.*?</figure>", page, re.S)[0]
    assert re.findall("<span>(.*?)</span>", figure)[1:] == ["this machine: quick", "this machine, changed settings: quick+lam=0.002"] and figure.count("<img") == 3
    assert "too small to judge" in page and "over 14 matrices" in page and "over 120 matrices" in page
