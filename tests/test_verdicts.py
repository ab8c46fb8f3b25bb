"""The scorecard is as strict as it says: size, vacuous checks, intervals, thresholds that decide, no silent change."""
from dataclasses import replace

import pytest

from fact_nb.lab import claims
from fact_nb.lab.claims import LEDGER
from fact_nb.lab.experiment import CHANGED, DIFFERS, HOLDS, NOT_RUN, registry
from fact_nb.lab.history import HISTORY, unrecorded
from fact_nb.lab.marks import CONSTRUCTED, SMALLER, VACUOUS
from fact_nb.lab.scorecard import scorecard, verdict_on
from fact_nb.lab.store import committed


@pytest.fixture(scope="module")
def rows(): return {r["id"]: r for r in scorecard()}


@pytest.fixture(scope="module")
def judged():
    "Experiment and committed result of each claim that one experiment alone judges."
    experiments = registry()
    of = {id: [e for e in experiments.values() if id in e.judges] for id in LEDGER}
    results = {n: committed(n) for n in experiments}
    return {id: (es[0], results[es[0].name]) for id, es in of.items() if len(es) == 1}


def marks(row): return {m["mark"] for m in row["marks"]}


def test_no_criterion_was_changed_in_silence(): assert unrecorded(LEDGER, HISTORY) == []


def test_every_claim_can_be_judged(rows):
    bad = {id: r["note"] for id, r in rows.items() if "could not be judged" in r["note"]}
    assert not bad and {r["verdict"] for r in rows.values()} <= {HOLDS, CHANGED, DIFFERS, NOT_RUN}


def test_a_smaller_run_never_reads_a_plain_holds(rows):
    small = {id: r["verdict"] for id, r in rows.items() if SMALLER in marks(r)}
    assert small and HOLDS not in small.values()


def test_what_cannot_fail_never_holds(rows):
    assert all(r["verdict"] == NOT_RUN for r in rows.values() if VACUOUS in marks(r))


def test_true_by_construction_is_said(rows):
    said = {id for id, r in rows.items() if CONSTRUCTED in marks(r)}
    assert said == {id for id, c in LEDGER.items() if c.kind == "construction"}


def test_statistical_claims_carry_an_interval_or_a_p_value(rows):
    for id, r in rows.items():
        if LEDGER[id].kind != "statistical" or not r["ours"]: continue
        assert r["estimates"] and all(e["runs"] >= 1 for e in r["estimates"]), id
        assert any(e["low"] is not None or e["p"] is not None for e in r["estimates"]), id


class Watched(dict):
    "Thresholds that remember which of them were asked for."
    def __init__(self, *a): super().__init__(*a); self.asked = set()
    def __getitem__(self, name): self.asked.add(name); return super().__getitem__(name)


THRESHOLDS = [(id, name) for id, c in LEDGER.items() for name in c.thresholds]


@pytest.mark.parametrize("id, name", THRESHOLDS, ids=lambda x: x)
def test_every_threshold_of_the_ledger_decides(id, name, judged, monkeypatch):
    "With the number moved far to one side or the other the verdict changes; where another number fails the claim already, it is at least read."
    if id not in judged: pytest.skip("judged by several experiments")
    exp, r = judged[id]
    fresh = lambda: replace(r)                # tables that were computed with other thresholds are left behind
    before = verdict_on(exp, id, fresh())
    if before["verdict"] == NOT_RUN: pytest.skip("not run")
    said = lambda j: (j["verdict"], j["ours"])
    seen = set()
    for far in (-1e9, 1e9):
        watched = Watched(dict(LEDGER[id].thresholds) | {name: far})
        moved = replace(LEDGER[id], thresholds=watched)
        monkeypatch.setitem(claims.LEDGER, id, moved)
        seen.add(said(verdict_on(exp, id, fresh())))
    fails_anyway = before["verdict"] == DIFFERS and name in watched.asked
    assert seen != {said(before)} or fails_anyway, (said(before), seen)


@pytest.mark.parametrize("id, verdict", [
    ("grok-100", DIFFERS), ("rfm-fixed-converse", DIFFERS), ("grok-random-circulant", DIFFERS), ("sep-figure-fact", DIFFERS),
    ("parity-unstable-later", DIFFERS), ("motion-cheap", DIFFERS), ("motion-tracks", DIFFERS), ("motion-change", DIFFERS),
    ("tab-beats-kernel", CHANGED), ("rfm-naive-undefined", CHANGED), ("epochs-sqrt-nontrivial", CHANGED), ("phase-rfm", CHANGED)])
def test_what_a_referee_found(id, verdict, rows): assert rows[id]["verdict"] == verdict, rows[id]
