"""The tabular benchmark: faithful to the published protocol, resumable, and the same whoever does the work."""
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from fact_nb.lab import experiment as protocol
from fact_nb.lab.workers import run_experiment
from fact_nb.data import uci
from fact_nb.data.cache import available
from fact_nb.data.uci import stand_in
from fact_nb.experiments import tabular
from fact_nb.lab.store import Store
from fact_nb.machines.batched import METHODS, Memo, Rules, Search, leak_free, published, reference
from fact_nb.machines.batched import solve_sketched as sketched

CORPUS = pytest.mark.skipif(not available("uci"), reason="the UCI corpus is not on this machine: fact data uci")
SMALL = ["tables=iris,wine,zoo,hayes-roth,teaching", "leak_free_n=140", "iters=2", "ridges=1.0,0.1"]     # seven units of a fraction of a second


def without_seconds(rows): return [{k: v for k, v in r.items() if k != "seconds"} for r in rows]


def by_hand(T, method, rules, train, validation, test):
    "Selection on one split and the score on another, with loops and explicit inverses: torch only."
    Y = torch.nn.functional.one_hot(T.y, T.n_classes).double()
    k = lambda A, B, M: torch.exp(-torch.stack([torch.stack([((a - b) @ M @ (a - b)).clamp(min=0).sqrt() for b in B]) for a in A]) / rules.bandwidth)
    found = []
    for scaled in (True, False):
        for ridge in rules.ridges:
            X = T.X / T.X.norm(dim=1, keepdim=True) if scaled else T.X
            A, M = X[train], torch.eye(X.shape[1]).double()
            for t in range(1 if method == "kernel" else rules.iters + 1):
                alpha = torch.linalg.inv(k(A, A, M) + ridge * torch.eye(len(A))) @ Y[train]
                found.append((int(((k(X[validation], A, M) @ alpha).argmax(1) == T.y[validation]).sum()), ridge, scaled, t, M))
                f = lambda x: torch.exp(-torch.where((D := ((x - A) @ M * (x - A)).sum(1)) > 1e-20, D, 1e-300).sqrt() / rules.bandwidth) @ alpha
                G = torch.stack([torch.autograd.functional.jacobian(f, x) for x in A])                   # n × c × d
                F = sum(torch.outer(g.T @ a, x) for g, a, x in zip(G, alpha, A))                         # FACT, up to its sign
                if method == "nfa": M = sum(g.T @ g for g in G) / len(A); continue
                P = F @ F.T if method == "fact" else F @ M @ M @ F.T
                e, V = torch.linalg.eigh((P + P.T) / 2); M = (V * e.clamp(min=0)**(.5 if method == "fact" else .25)) @ V.T
    best = max(found, key=lambda b: b[0])
    return best


@pytest.mark.parametrize("method", METHODS)
def test_choices_follow_from_autograd_and_loops(method):
    T = stand_in("iris"); keep = torch.arange(0, 150, 4)
    T = replace(T, X=T.X[keep], y=T.y[keep], train=torch.arange(0, 38, 2), validation=torch.arange(1, 38, 2), folds=((torch.arange(0, 28), torch.arange(28, 38)),))
    rules = Rules(methods=(method,), ridges=(1., .1), iters=2)
    hits, ridge, scaled, t, _ = by_hand(T, method, rules, T.train, T.validation, None)
    row, = published(rules, T)
    assert (row["ridge"], row["normalised"], row["iterate"], round(row["validation"] * 19)) == (ridge, scaled, t, hits)


@CORPUS
@pytest.mark.parametrize("name", ["balance-scale", "lenses", "post-operative", "audiology-std", "heart-va", "seeds", "pittsburg-bridges-TYPE"])
def test_the_fast_way_makes_the_choices_of_the_plain_one(name):
    T = uci.load(name, download=False)
    for row in published(Rules(), T):
        plain = reference(T, row["method"])
        assert {k: row[k] for k in plain} == plain, row["method"]


@CORPUS
def test_large_tables_by_triangle_by_refinement_by_a_sketch_and_by_blocks_give_the_same(monkeypatch):
    T = uci.load("ecoli", download=False)
    base = without_seconds(published(Rules(), T))
    monkeypatch.setattr(Search, "small", False)
    assert without_seconds(published(Rules(), T)) == base
    monkeypatch.setattr("fact_nb.machines.batched.REFINE", 10)
    assert without_seconds(published(Rules(), T)) == base
    used = []
    monkeypatch.setattr("fact_nb.machines.batched.SKETCH", 10)
    monkeypatch.setattr("fact_nb.machines.batched.solve_sketched", lambda *a: used.append(sketched(*a)) or used[-1])
    assert without_seconds(published(Rules(), T)) == base
    assert len(used) > 50 and sum(a is None for a in used) < len(used) / 10
    monkeypatch.setattr("fact_nb.machines.batched.BLOCKED", 10)
    assert without_seconds(published(Rules(), T)) == base


@CORPUS
def test_once_every_row_is_right_the_search_ends(monkeypatch):
    T = uci.load("acute-nephritis", download=False)
    monkeypatch.setattr(Search, "small", False)
    memo = Memo(); rows = published(Rules(), T, memo)
    assert rows[0]["validation"] == 1 and len([k for k in memo.found if k.startswith("fact ")]) < 10      # of 5 ridges × 2 scalings
    for row in rows:
        plain = reference(T, row["method"])
        assert {k: row[k] for k in plain} == plain


def test_leak_free_learns_from_training_rows_alone():
    T = stand_in("wine"); train, test = T.folds[1]
    X = T.X.clone(); X[test] = 7.                                       # other test rows, other labels: M and the setting must not move
    other = replace(T, X=X, y=T.y.clone().index_fill_(0, test, 0), folds=((train, test),))
    a, b = Memo(), Memo()
    leak_free(Rules(), replace(T, folds=((train, test),)), a); leak_free(Rules(), other, b)
    assert a.found["fold 0"].keys() == b.found["fold 0"].keys()
    assert all(str(a.found["fold 0"][k]) == str(b.found["fold 0"][k]) for k in a.found["fold 0"])


# ---------------------------------------------------------------- settings

@pytest.mark.parametrize("setting", ["iters=1", "ridges=10.0", "bandwidth=0.5", "methods=kernel,fact"])
def test_settings_change_rows(setting, tmp_path):
    go = lambda *s: run_experiment(tabular.experiment, "quick", [*(["tables=heart-va"] if available("uci") else []), "leak_free_n=0", *s], results=tmp_path, progress=False).df
    a, b = go(), go(setting)
    columns = ["method", "accuracy", "ridge", "iterate", "validation"]
    assert without_seconds(a[columns].to_dict("records")) != without_seconds(b[columns].to_dict("records"))


@CORPUS
def test_settings_decide_the_units():
    cfg = tabular.presets["cpu"]
    count = lambda **kw: len(tabular.units(protocol.replace(cfg, **kw)))
    all_ = tabular.units(cfg)
    n = lambda u: uci.META[u["table"]].n
    assert sum(u["protocol"] == "published" for u in all_) == 119 and sum(u["protocol"] == "leak-free" for u in all_) == sum(m.n <= 5000 for m in uci.META.values()) == 106
    assert count(max_n=1100) < count(max_n=5000) < count()
    assert count(leak_free_n=0) == count() - 106 and count(skip=("iris", "connect-4")) < count() and count(baseline_n=0) < count()
    order = [n(u) for u in all_ if u["protocol"] == "published"]
    assert order == sorted(order)
    assert not any(u.get("table") == "connect-4" for u in all_)
    assert sum(u["protocol"] == "published" for u in tabular.units(tabular.presets["paper"])) == 120


# ---------------------------------------------------------------- resuming, workers, damage

def stored(root, label="quick"):
    return {p.name: without_seconds(json.loads(p.read_text())["rows"]) for p in sorted((root / "tabular" / label).glob("*.json"))}


FOLDER = "quick+ridges=1-0.1+iters=2"


@CORPUS
def test_processes_and_dask_give_what_one_process_gives(tmp_path):
    go = lambda where, **kw: run_experiment(tabular.experiment, "quick", SMALL, results=tmp_path / where, progress=False, **kw)
    go("one"); go("two", workers=2)
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        go("dask", engine="dask", scheduler=cluster.scheduler_address)
    one = stored(tmp_path / "one", FOLDER)
    assert len(one) == 7
    assert stored(tmp_path / "two", FOLDER) == one and stored(tmp_path / "dask", FOLDER) == one


def test_no_dask_and_no_scheduler_are_one_line(monkeypatch, tmp_path):
    go = lambda **kw: run_experiment(tabular.experiment, "quick", results=tmp_path, progress=False, **kw)
    with pytest.raises(protocol.UsageError, match="no Dask scheduler answers at tcp://127.0.0.1:9"):
        monkeypatch.setattr("distributed.Client", lambda *a, **k: (_ for _ in ()).throw(OSError("refused")))
        go(engine="dask", scheduler="tcp://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(protocol.UsageError, match="pip install 'fact_nb\\[dask\\]'"): go(engine="dask")


@CORPUS
def test_killed_at_random_and_resumed_nothing_is_lost_or_done_twice(tmp_path):
    argv = [sys.executable, "-m", "fact_nb", "run", "tabular", "--quiet", "--resume", *sum((["--set", s] for s in SMALL), [])]
    env = dict(os.environ, OMP_NUM_THREADS="1")
    whole = tmp_path / "whole"; broken = tmp_path / "broken"
    subprocess.run([*argv, "--results", str(whole)], env=env, check=True, capture_output=True)
    rng, folder, kept = random.Random(0), broken / "tabular" / FOLDER, {}
    for sig in (signal.SIGKILL, signal.SIGINT):
        p = subprocess.Popen([*argv, "--results", str(broken)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while p.poll() is None and len(list(folder.glob("*.json"))) <= len(kept): time.sleep(.01)
        time.sleep(rng.uniform(0, .2)); p.send_signal(sig); p.wait()
        now = {f.name: f.read_bytes() for f in folder.glob("*.json")}
        assert all(now[k] == v for k, v in kept.items())                                       # what was done stays as it was
        kept = now
    subprocess.run([*argv, "--results", str(broken)], env=env, check=True, capture_output=True)
    assert all((folder / k).read_bytes() == v for k, v in kept.items())
    assert stored(broken, FOLDER) == stored(whole, FOLDER)


@CORPUS
def test_a_longer_run_continues_a_shorter_one(tmp_path, monkeypatch):
    small = replace(tabular.experiment, presets=dict(cpu=tabular.Config(tables=("iris", "zoo", "wine"), max_n=160, iters=1, leak_free_n=0)))
    seen = []
    monkeypatch.setattr(tabular, "examine", lambda cfg, unit, T, ctx: seen.append(T.name) or [dict(method="kernel", accuracy=.5)])
    monkeypatch.setattr(tabular, "count_tables", lambda: protocol.Output([dict(readable=120)]))
    go = lambda *s: run_experiment(small, "cpu", s, results=tmp_path, progress=False, workers=1)
    go("max_n=120"); go(); go("max_n=200")
    assert seen == ["zoo", "iris", "wine"]
    assert Store(tmp_path).labels("tabular") == ["cpu", "cpu+max_n=120", "cpu+max_n=200"]


@CORPUS
def test_a_search_interrupted_inside_a_table_goes_on_there(tmp_path, monkeypatch):
    T, rules = uci.load("glass", download=False), Rules(ridges=(1., .1), iters=2)
    monkeypatch.setattr(Search, "small", False)
    whole, calls = without_seconds(published(rules, T)), []
    from fact_nb.machines import batched as exam
    walk = exam.walk
    monkeypatch.setattr(exam, "walk", lambda s, m, r, M: calls.append((m, r)) or (walk(s, m, r, M) if len(calls) != 4 else (_ for _ in ()).throw(KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt): published(rules, T, Memo(tmp_path / "memo.pt", "glass", every=0))
    assert without_seconds(published(rules, T, Memo(tmp_path / "memo.pt", "glass", every=0))) == whole
    assert len(calls) == 12 + 1                                            # 3 learners × 2 ridges × 2 scalings, and the one that was cut off


@CORPUS
def test_a_damaged_table_is_named_and_the_rest_completes(tmp_path, monkeypatch, recwarn):
    load = uci.load
    def damaged(name, download=True):
        if name == "zoo": raise ValueError("zoo/zoo_R.dat is damaged: 3 rows of 18 numbers, expected 101 of 18")
        return load(name, download)
    monkeypatch.setattr(tabular, "load", damaged)
    go = lambda: run_experiment(tabular.experiment, "quick", SMALL, results=tmp_path, progress=False, resume=True)
    r = go()
    assert any("zoo was left out: zoo/zoo_R.dat is damaged" in str(w.message) for w in recwarn)
    assert set(tabular.marks(r).index) == {"iris", "wine", "hayes-roth", "teaching"}
    assert all(j(r) is None for j in tabular.judges.values())
    monkeypatch.setattr(tabular, "load", load)
    before = {p.name: p.read_bytes() for p in (tmp_path / "tabular" / FOLDER).glob("*.json") if "zoo" not in p.name}
    assert "zoo" in tabular.marks(go()).index                              # tried again, and only that
    assert all((tmp_path / "tabular" / FOLDER / k).read_bytes() == v for k, v in before.items())


def test_without_the_corpus_quick_uses_scikit_learn_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "available", lambda name: False)
    r = run_experiment(tabular.experiment, "quick", ["iters=1", "leak_free_n=0"], results=tmp_path, progress=False)
    assert set(r.df.source) == {"scikit-learn"} and set(r.df.table) == {"iris", "wine", "breast_cancer"}


def test_a_baseline_is_scored_on_the_same_splits():
    T = stand_in("wine")
    row, = tabular.baseline("logistic", T)
    from sklearn.linear_model import LogisticRegression
    X, y = T.X.numpy(), T.y.numpy()
    hand = np.mean([(LogisticRegression(max_iter=2000).fit(X[a], y[a]).predict(X[b]) == y[b]).mean() for a, b in T.folds])
    assert row["accuracy"] == pytest.approx(hand) and row["by"] == "sklearn"


@CORPUS
def test_costs_rise_with_size_and_large_tables_run_alone():
    cfg = tabular.Config()
    cost = lambda k: tabular.experiment.cost(cfg, dict(protocol="published", table=k))
    assert cost("zoo") < cost("yeast") < cost("spambase") < cost("letter") < cost("statlog-shuttle") < cost("connect-4")
    assert tabular.batch(cfg, dict(protocol="published", table="waveform")) and not tabular.batch(cfg, dict(protocol="published", table="letter"))
