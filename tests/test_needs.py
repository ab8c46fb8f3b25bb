"""What a run needs: counts against the seconds that were recorded, and memory against cards."""
from dataclasses import replace

import pytest

from fact_nb.lab.check import judging
from fact_nb.lab.cost import COST_GROUPS, bounds, judge_cost
from fact_nb.lab.experiment import CHANGED, DIFFERS, HOLDS, NOT_RUN, UsageError, registry
from fact_nb.lab.needs import Rates, in_words
from fact_nb.lab.scorecard import gather, scorecard
from fact_nb.lab.store import Result, Store, StoredUnit, repository_results, sign, write_record

NAMES = sorted(registry())


@pytest.mark.parametrize("name", NAMES)
def test_the_estimate_is_within_a_factor_of_four_of_the_recorded_seconds(name):
    "Of the committed cpu result, at the rates of one core of the machine that made it."
    exp, store = registry()[name], Store(repository_results())
    whole = store.whole(name, "cpu")
    units = [store.read_unit(name, whole.get("folder", "cpu"), k)["unit"] for k in whole["units"]]
    cfg = exp.preset("cpu")
    estimated = sum(exp.cost(cfg, u) for u in units)
    recorded = whole["provenance"]["seconds"]
    assert recorded / 4 < estimated < 4 * recorded


@pytest.mark.parametrize("name", NAMES)
def test_every_unit_of_every_preset_is_counted(name):
    exp = registry()[name]
    for preset in exp.presets:
        cfg = exp.preset(preset)
        for need in exp.needs(cfg, Rates("cpu", 5e10, 2e10, 4e-6, 8e9)):
            assert need.seconds > 0 and need.bytes >= 0


def test_what_computes_on_the_cpu_does_not_get_faster_with_the_device():
    fast = Rates("cuda", 1e15, 1e15, 1e-9, 8e10)
    slow = Rates("cpu", 5e10, 2e10, 4e-6, 8e9)
    for name, exp in registry().items():
        cfg = exp.preset("paper")
        for need in exp.needs(cfg, fast, slow):
            same = need.seconds == exp.needs(cfg, slow, slow, [need.unit])[0].seconds
            assert same == bool(need.cpu_only), (name, need)


def test_a_device_without_float64_cannot_do_what_needs_it():
    narrow = Rates("mps", 1e13, 0., 1e-5, 3e10)
    parity, depth = (registry()[n] for n in ("parity", "depth"))
    assert "not possible" in in_words(parity.needs(parity.preset("paper"), narrow))
    assert "not possible" not in in_words(depth.needs(depth.preset("paper"), narrow))


def peak(name, preset="paper"):
    exp = registry()[name]
    return max(exp.work(exp.preset(preset), u).bytes for u in exp.units(exp.preset(preset)))


@pytest.mark.parametrize("name", NAMES)
def test_every_paper_preset_fits_a_card_of_48_gb(name):
    assert peak(name) <= 48e9


def made_up(store, name, device, device_name, seconds, **more):
    "A finished paper result of one unit, as a run on that device would have left it."
    made = dict(device=device, device_name=device_name, seconds=seconds, **more)
    record = dict(unit=dict(seed=0), config={}, rows=[dict(a=1)], provenance=made)
    write_record(store.unit_path(name, "paper", "seed=0"), record)
    write_record(store.whole_path(name, "paper"),
                 dict(label="paper", folder="paper", units=["seed=0"], config={}, provenance=made))
    sign(store, name, "paper")


@pytest.fixture
def cost_of(tmp_path):
    "What the scorecard says about cost-table, from a store outside of any repository."
    experiments = {n: replace(e, judges={}) for n, e in registry().items()}
    runs = lambda: gather(tmp_path, experiments, committed=tmp_path)
    row = lambda: next(r for r in scorecard(None, experiments, runs()) if r["id"] == "cost-table")
    return Store(tmp_path), row


EVERY = [n for group in COST_GROUPS.values() for n in group]


def test_units_of_the_cpu_say_nothing_about_gpu_hours_and_the_estimate_stands_there(cost_of):
    store, row = cost_of
    for name in EVERY: made_up(store, name, "cpu", "x86_64", 60.)
    said = row()
    assert said["verdict"] == said["here"]["verdict"] == NOT_RUN and not said["here"]["note"]
    assert "estimated on an A40" in said["note"] and "parity" in said["note"]


def test_units_of_a_gpu_are_judged_against_the_paper(cost_of):
    store, row = cost_of
    for name in EVERY: made_up(store, name, "cuda:0", "NVIDIA A40", 360.)
    said = row()["here"]
    assert said["verdict"] == HOLDS and "parity 0.2 of < 1 h" in said["ours"]
    assert "tabular/paper" in said["result"]
    made_up(store, "deep_linear", "cuda:0", "NVIDIA A40", 2 * 3600.)
    said = row()["here"]
    assert said["verdict"] == DIFFERS and "deep_linear" in said["note"]
    made_up(store, "deep_linear", "cuda:0", "NVIDIA H100", 60.)
    said = row()["here"]
    assert said["verdict"] == CHANGED and "H100" in said["note"]


def test_one_gpu_result_is_enough_for_a_verdict_and_what_is_missing_is_named(cost_of):
    store, row = cost_of
    made_up(store, "parity", "cuda:0", "NVIDIA A40", 360.)
    made_up(store, "separation", "cpu", "x86_64", 360., cpu_only="least squares of the host")
    said = row()["here"]
    assert said["verdict"] == CHANGED and "still to run: tabular" in said["note"]
    assert "separation 0.1 of < 1 h, 0.1 of them on the CPU" in said["ours"]


@pytest.mark.parametrize("group", COST_GROUPS)
def test_every_bound_of_the_cost_table_decides(group):
    hour = dict(device="cuda:0", device_name="NVIDIA A40", seconds=3600. * bounds()[group])
    def verdict(seconds):
        unit = StoredUnit("u", {}, {}, dict(hour, seconds=seconds))
        return judge_cost({COST_GROUPS[group][0]: Result("x", "paper", {}, None, units=[unit])}).verdict
    assert verdict(hour["seconds"]) == DIFFERS and verdict(.99 * hour["seconds"]) == CHANGED


def test_a_claim_about_all_runs_has_no_unit_to_run_again():
    with pytest.raises(UsageError, match="fact report"): judging("cost-table")
