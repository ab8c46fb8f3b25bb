"""The kernel theory in numbers: the checks notice errors, and every setting changes the outcome."""
import dataclasses

import matplotlib.pyplot as plt
import pytest
import torch

from fact_nb.linalg import rel_err
from fact_nb.experiments import kernel_theory as k
from fact_nb.machines.kernels import Gaussian
from fact_nb.lab.experiment import Context, UsageError, override
from fact_nb.lab.workers import run_experiment

SMALL = k.Config(kernels=("quadratic",), n=6, d=3, c=2)


def do(tmp_path, cfg=SMALL, **unit):
    return k.run_unit(cfg, dict(part="identity", kernel="quadratic", seed=0) | unit, Context(torch.device("cpu"), tmp_path, progress=False))


def test_the_definition_notices_a_wrong_kernel(tmp_path, monkeypatch):
    monkeypatch.setitem(k.LIBRARY, "gaussian", Gaussian(2.001))          # the library's bandwidth a little off
    rows = {r["check"]: r["value"] for r in do(tmp_path, kernel="gaussian").rows}
    assert rows["FACT, library"] > 1e-5 and rows["FACT through α"] < 1e-10 and rows["Algorithm 1, geometric"] > 1e-6


def test_the_definition_notices_agop_in_facts_place():
    X, Y, W = k.draw(SMALL, 0); a = k.dual(k.PLAIN["cubic"], X, Y, W, 6 * .05)
    F, A = k.fact_definition(k.PLAIN["cubic"], X, Y, W, a, .05), k.agop_definition(k.PLAIN["cubic"], X, W, a)
    assert rel_err(F, A * (A * F).sum() / A.square().sum()) > .1         # even at its best scale


@pytest.mark.parametrize("field, value", [("n", 7), ("d", 4), ("c", 3), ("lam", .1)])
def test_settings_change_a_run(tmp_path, field, value):
    pick = lambda o: next(r["value"] for r in o.rows if r["check"] == "τ against k'")
    assert abs(pick(do(tmp_path)) - pick(do(tmp_path, dataclasses.replace(SMALL, **{field: value})))) > 1e-9 or field in ("c", "lam")
    X, Y, W = k.draw(dataclasses.replace(SMALL, **{field: value}), 0); X0, Y0, W0 = k.draw(SMALL, 0)
    ridge = lambda c, X: c.lam * len(X)
    a, a0 = k.dual(k.PLAIN["quadratic"], X, Y, W, ridge(dataclasses.replace(SMALL, **{field: value}), X)), k.dual(k.PLAIN["quadratic"], X0, Y0, W0, ridge(SMALL, X0))
    assert a.shape != a0.shape or rel_err(a0, a) > 1e-3


@pytest.mark.parametrize("field, value", [("kernels", ("quadratic", "laplace")), ("seeds", 2)])
def test_grid_settings_add_units_and_keep_the_old(field, value):
    units = [tuple(u.items()) for u in k.units(SMALL)]
    more = [tuple(u.items()) for u in k.units(dataclasses.replace(SMALL, **{field: value}))]
    assert len(more) > len(units) and set(units) <= set(more) and len(more) == len(set(more))


@pytest.mark.parametrize("bad, says", [("lam=0", "positive"), ("kernels=sinc", "among laplace"), ("seeds=0", "at least 1")])
def test_bad_settings_are_answered_in_one_line(bad, says):
    with pytest.raises(UsageError, match=says) as e: override(k.Config(), [bad])
    assert "\n" not in str(e.value)


def test_too_few_kernels_cannot_say(tmp_path):
    exp = dataclasses.replace(k.experiment, presets=dict(quick=SMALL))
    r = run_experiment(exp, "quick", results=tmp_path, progress=False, device="cpu")
    verdicts = {i: j(r) for i, j in k.judges.items()}
    assert verdicts["prop-agop"] is None and verdicts["lemma-fact-alpha"] is None
    assert verdicts["rfm-fixed-converse"].verdict == "differs"
    plt.close(k.draw_errors(r))
