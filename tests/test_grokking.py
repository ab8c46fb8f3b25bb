"""Modular arithmetic: the measure of circulance, the list of work, and every setting in a case where it changes the outcome."""
import dataclasses
import warnings

import numpy as np
import pytest
import torch

from fact_nb.linalg import rel_err
from fact_nb.data.synthetic import modular
from fact_nb.experiments import grokking as g
from fact_nb.lab.experiment import Context, UsageError, override
from fact_nb.lab.workers import run_experiment

TINY = g.Config(p=7, fraction=.6, iters=3, nfa_iters=2, draws=2, kernels=("quadratic",), seeds=1, ops=("mul",), fractions=(.6,), grid_seeds=1)
UNIT = dict(op="add", kernel="quadratic", method="fact", fraction=.6, seed=0)


def do(tmp_path, cfg=TINY, **changes):
    return g.run_unit(cfg, UNIT | changes, Context(torch.device("cpu"), tmp_path, progress=False))


def test_rows_agree_with_a_machine_written_from_the_definitions(tmp_path):
    D, M = modular(7, "+", .6, 0), torch.eye(14, dtype=torch.float64)
    for row in do(tmp_path).rows:
        T = D.X @ M @ D.X.T
        a = torch.linalg.solve(T**2 + TINY.ridge * torch.eye(len(D.X), dtype=M.dtype), D.Y)
        test = (D.X_test @ M @ D.X.T)**2 @ a
        assert row["errors"] == int((test.argmax(1) != D.Y_test.argmax(1)).sum())
        assert np.isclose(row["test_loss"], float((test - D.Y_test).square().sum(1).mean()), rtol=1e-3)
        assert np.isclose(row["trace"], float(M.trace()), rtol=1e-3)
        FM = M @ D.X.T @ ((2 * T) * (a @ a.T)) @ D.X @ M              # FACT · M
        e, V = torch.linalg.eigh((FM + FM.T) / 2)
        M = (V * e.abs().sqrt()) @ V.T
    assert rel_err(torch.from_numpy(np.asarray(do(tmp_path).arrays["first"])).double(), torch.eye(14).double()) > .1


def test_circulant_energy_is_a_projection():
    B = torch.randn(11, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    C = g.circulant(g.generator(B)); c, b = C - C.mean(), B - B.mean()
    assert np.isclose(g.circulant_energy(B), float(c.square().sum() / b.square().sum()))
    assert abs(float((c * (b - c)).sum())) < 1e-9                      # what is left is orthogonal
    assert np.isclose(g.circulant_energy(B.flip(1), 1), g.circulant_energy(B))


@pytest.mark.parametrize("field, value, unit", [("p", 11, {}), ("iters", 4, {}), ("nfa_iters", 3, dict(method="nfa")), ("ridge", 1., {}), ("bandwidth", 1., dict(kernel="gaussian"))])
def test_settings_change_a_run(tmp_path, field, value, unit):
    base, other = do(tmp_path, **unit).rows, do(tmp_path, dataclasses.replace(TINY, **{field: value}), **unit).rows
    assert len(base) != len(other) or any(abs(a["test_loss"] - b["test_loss"]) > 1e-6 for a, b in zip(base, other))


def test_units_change_a_run(tmp_path):
    end = lambda u: do(tmp_path, **u).rows[-1]
    final = {str(u): (end(u)["test_loss"], end(u)["trace"]) for u in ({}, dict(seed=1), dict(op="sub"), dict(op="mul"), dict(op="div"), dict(kernel="gaussian"), dict(kernel="gaussian", method="nfa"), dict(kernel="gaussian", method="centred"), dict(method="nfa"), dict(method="plain"), dict(method="rescaled"), dict(fraction=.5))}
    assert len(set(final.values())) == len(final), final                # plain and rescaled differ in scale only, as long as the ridge is far away


def test_draws_and_fraction_change_the_random_features(tmp_path):
    rows = lambda cfg: g.run_unit(cfg, dict(op="random", kernel="quadratic"), Context(torch.device("cpu"), tmp_path, False)).rows
    assert len(rows(TINY)) == 8 and len(rows(dataclasses.replace(TINY, draws=1))) == 4
    assert sum(r["errors"] for r in rows(TINY)) != sum(r["errors"] for r in rows(dataclasses.replace(TINY, fraction=.3)))


@pytest.mark.parametrize("field, value", [("kernels", ("quadratic", "gaussian")), ("seeds", 2), ("ops", ("mul", "div")), ("fractions", (.5, .6)), ("grid_seeds", 2)])
def test_grid_settings_add_units_and_keep_the_old(field, value):
    units = [tuple(u.items()) for u in g.units(TINY)]
    more = [tuple(u.items()) for u in g.units(dataclasses.replace(TINY, **{field: value}))]
    assert len(more) > len(units) and set(units) <= set(more) and len(more) == len(set(more))
    assert ("centred" in {dict(u).get("method") for u in more}) == (field == "kernels")                # the NFA is centred for the Gaussian kernel only


def test_the_cpu_preset_is_the_papers_size():
    c = g.presets["cpu"]
    assert (c.p, c.fraction, c.iters, c.draws) == (61, .5, 75, 10) and c.grid_seeds >= 5 and set(c.fractions) == {.3, .4, .5}
    assert g.units(c)[0] == dict(op="add", kernel="quadratic", method="fact", fraction=.5, seed=0)      # the headline comes first


@pytest.mark.parametrize("bad, says", [("p=9", "prime"), ("fraction=0", "between 0 and 1"), ("fractions=.5,1", "between 0 and 1"), ("bandwidth=0", "positive"), ("iters=0", "at least 1"), ("ops=xor", "among add")])
def test_bad_settings_are_answered_in_one_line(bad, says):
    with pytest.raises(UsageError, match=says) as e: override(g.Config(), [bad])
    assert "\n" not in str(e.value)


def test_judges_do_not_crash_on_a_tiny_result_and_see_a_swap(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exp = dataclasses.replace(g.experiment, presets=dict(quick=TINY))
        r = run_experiment(exp, "quick", results=tmp_path, progress=False, device="cpu")
    verdicts = {k: j(r) for k, j in g.judges.items()}
    assert verdicts["grok-100"] is None and verdicts["grok-random-circulant"] is None and verdicts["rfm-plain-unstable-modular"] is None
    assert verdicts["rfm-naive-undefined"].verdict == "holds with a change"      # real and non-negative here, only not symmetric
    for f in g.figures.values():
        import matplotlib.pyplot as plt
        plt.close(f.draw(r))


def test_an_unstable_run_counts_as_failed(tmp_path):
    exp = dataclasses.replace(g.experiment, presets=dict(quick=dataclasses.replace(TINY, p=11, iters=25)))
    r = run_experiment(exp, "quick", results=tmp_path, progress=False, device="cpu")
    s = g.stability(r)
    assert s.loc["plain"].swing.iloc[0] > 3 and s.loc["plain"].failed.iloc[0] == 1 and s.loc["fact"].swing.iloc[0] < .1
