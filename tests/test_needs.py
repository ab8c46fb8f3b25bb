"""What a run needs: counts against the seconds that were recorded, and memory against cards."""
import json

import pytest

from fact_nb.lab.experiment import registry
from fact_nb.lab.needs import Rates, in_words
from fact_nb.lab.store import Store, repository_results

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
