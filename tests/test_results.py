"""Committed results can be made again: one unit of each is rerun and compared."""
import json
from pathlib import Path

import numpy as np
import pytest

from fact_nb.core import device
from fact_nb.data.cache import available
from fact_nb.protocol import Context, plain, registry
from fact_nb.store import Store, read_record

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
