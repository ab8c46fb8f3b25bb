"""τ against k': the numbers from their definitions, and every setting in a case where it changes the outcome."""
import dataclasses

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from fact_nb.data.synthetic import modular
from fact_nb.experiments import similarity as s
from fact_nb.machines.kernels import Exponential, Gaussian, Quadratic
from fact_nb.lab.experiment import Context, UsageError, override
from fact_nb.lab.workers import run_experiment

TINY = s.Config(p=7, fraction=.6, other_p=7, other_fraction=.6, iters=3, nfa_iters=2, looks=2, tasks=("add", "parity"), kernels=("quadratic", "exponential"), seeds=1)
UNIT = dict(task="add", kernel="quadratic", method="fact", seed=0)


def do(tmp_path, cfg=TINY, **changes):
    return s.run_unit(cfg, UNIT | changes, Context(torch.device("cpu"), tmp_path, progress=False))


@pytest.mark.parametrize("kernel", [Quadratic(), Exponential(3.), Gaussian(2.)])
def test_factors_from_two_loops(kernel):
    g = torch.Generator().manual_seed(0)
    X, V = torch.randn(6, 3, generator=g, dtype=torch.float64), torch.randn(3, 3, generator=g, dtype=torch.float64)
    M = V.T @ V
    def k1(x, z):
        if kernel.radial: return float(torch.exp(-(x - z) @ M @ (x - z) / 8))
        t = (x @ M @ z).clone().requires_grad_()
        return float(torch.autograd.grad(t**2 if isinstance(kernel, Quadratic) else torch.exp(t / 3), t)[0])
    A = np.array([[k1(x, z) for z in X] for x in X])
    a, tau = s.factors(kernel, X, M)
    assert np.allclose(a, A) and np.allclose(tau, sum(np.outer(A[l], A[l]) for l in range(6)) / 6)


def test_the_value_at_the_identity_is_the_known_one():
    X = modular(61).X
    assert abs(s.slope_fit(*s.factors(Quadratic(), X, torch.eye(122, dtype=X.dtype)))[1] - .943) < 1e-3


def test_shuffling_keeps_the_spectrum_and_the_groups():
    M = torch.arange(36.).view(6, 6); M = M + M.T
    N = s.shuffled(M, [torch.arange(3), torch.arange(3, 6)])
    assert not torch.equal(M, N) and torch.allclose(torch.linalg.eigvalsh(M), torch.linalg.eigvalsh(N), atol=1e-3)
    assert torch.equal(M[:3, 3:].flatten().sort().values, N[:3, 3:].flatten().sort().values)


@pytest.mark.parametrize("field, value, unit", [("p", 11, {}), ("fraction", .5, {}), ("other_p", 11, dict(task="mul")), ("other_fraction", .5, dict(task="sub")), ("iters", 4, {}), ("nfa_iters", 3, dict(method="nfa")),
                                                ("looks", 1, {}), ("ridge", 1., {}), ("bandwidth", 1., dict(kernel="exponential")), ("bandwidth", 1., dict(kernel="gaussian"))])
def test_settings_change_a_run(tmp_path, field, value, unit):
    base, other = do(tmp_path, **unit).rows, do(tmp_path, dataclasses.replace(TINY, **{field: value}), **unit).rows
    assert len(base) != len(other) or any(a["iter"] != b["iter"] or abs(a["objective"] - b["objective"]) > 1e-6 * a["objective"] for a, b in zip(base, other))


@pytest.mark.parametrize("field, value", [("tasks", ("add", "parity", "mul")), ("kernels", ("quadratic", "exponential", "gaussian")), ("seeds", 2)])
def test_grid_settings_add_units_and_keep_the_old(field, value):
    units = [tuple(u.items()) for u in s.units(TINY)]
    more = [tuple(u.items()) for u in s.units(dataclasses.replace(TINY, **{field: value}))]
    assert len(more) > len(units) and set(units) <= set(more) and len(more) == len(set(more))


@pytest.mark.parametrize("bad, says", [("p=8", "primes"), ("fraction=1", "between 0 and 1"), ("tasks=add,div", "among add"), ("bandwidth=0", "positive"), ("iters=0", "at least 1")])
def test_bad_settings_are_answered_in_one_line(bad, says):
    with pytest.raises(UsageError, match=says) as e: override(s.Config(), [bad])
    assert "\n" not in str(e.value)


def test_judges_and_figures_on_a_tiny_result(tmp_path):
    exp = dataclasses.replace(s.experiment, presets=dict(quick=TINY))
    r = run_experiment(exp, "quick", results=tmp_path, progress=False, device="cpu")
    verdicts = {k: j(r) for k, j in s.judges.items()}
    assert verdicts["sim-tau-kprime"] is None and verdicts["sim-similar-features"] is None and verdicts["nfa-minimises"] is not None
    up = r.df.assign(objective=np.where(r.df.method == "nfa", r.df.objective * (1 + r.df.iter), r.df.objective))
    assert s.judge_minimises(dataclasses.replace(r, df=up)).verdict == "differs"              # an objective that rises is seen
    for f in s.figures.values(): plt.close(f.draw(r))


def test_the_cpu_preset_is_the_papers_size():
    c = s.presets["cpu"]
    assert (c.p, c.fraction, c.iters) == (61, .5, 75) and {"quadratic", "exponential", "gaussian"} == set(c.kernels)
