"The stable update: gradients by autograd, monotone runs over kernels and ridges, faults, and resumption after a kill."
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fact_nb.linalg import psd_power, rel_err
from fact_nb.machines.estimators import RFMClassifier
from fact_nb.experiments.stable import follow_update, make, presets
from fact_nb.machines.kernels import ExpPower, Exponential, Gaussian, Laplace, Polynomial, Quadratic
from fact_nb.files import fingerprint
from fact_nb.machines.rfm import RFM, Settings, identity_of, problem
from fact_nb.machines.updates import defect, gradient, nearest
from fact_nb.machines.updates import metric_of as metric
from fact_nb.lab.store import read_record

ROOT = Path(__file__).resolve().parent.parent
KERNELS = [Laplace(2.), Gaussian(2.), ExpPower(2., 1.4), Quadratic(), Polynomial(3, 1.), Exponential(4.)]
ids = lambda k: type(k).__name__
stable = lambda kernel, **kw: RFM(kernel, **(dict(update="stable", normalize=None, progress=False) | kw))


def data(n=60, d=5, c=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=g, dtype=torch.float64)
    return X, torch.stack([torch.sin(2 * X[:, 0]), X[:, 0] * X[:, 1], X[:, 2]][:c], 1)


def phi(kernel, X, Y, W, ridge, w=None):
    "The objective from torch alone, differentiable in W."
    Z = X @ W.T
    far, t = ((Z[:, None] - Z[None])**2).sum(-1) + 1e-30 * torch.eye(len(X)), Z @ Z.T
    K = {Laplace: lambda: (-far.sqrt() / 2).exp(), Gaussian: lambda: (-far / 8).exp(), ExpPower: lambda: (-(far / 4)**.7).exp(), Quadratic: lambda: t**2,
         Polynomial: lambda: (t + 1)**3, Exponential: lambda: (t / 4).exp()}[type(kernel)]()
    u = torch.ones(len(X), 1, dtype=X.dtype) if w is None else w.sqrt()[:, None]
    return (u * Y * torch.linalg.solve(u * K * u.T + ridge * torch.eye(len(X), dtype=X.dtype), u * Y)).sum() / 2 + W.square().sum() / 2


@pytest.mark.parametrize("kernel", KERNELS, ids=ids)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
def test_every_step_lowers_the_objective_by_hand(kernel, weighted):
    X, Y = data(); w = torch.rand(60, generator=torch.Generator().manual_seed(1), dtype=X.dtype) + .1 if weighted else None
    seen = []
    for iters in (0, 1, 3, 9):
        m = stable(kernel, iters=iters, ridge=.3, settle=0.).fit(X, Y, sample_weight=w)
        seen.append(float(phi(kernel, X, Y, psd_power(m.M, .5, negative="clip"), .3, w)))
        assert m.history[-1]["objective"] == pytest.approx(seen[-1], rel=1e-6)
        J = [h["objective"] for h in m.history]; assert all(b < a for a, b in zip(J, J[1:]))
    assert seen == sorted(seen, reverse=True) and seen[-1] < .99 * seen[0]


@pytest.mark.parametrize("kernel", KERNELS, ids=ids)
def test_it_ends_at_a_critical_point(kernel):
    X, Y = data()
    m = stable(kernel, iters=200, ridge=.3, settle=1e-5).fit(X, Y)
    assert m.history[-1]["defect"] <= 1e-5 and len(m.history) < 200
    W = psd_power(m.M, .5, negative="clip").requires_grad_()
    G, = torch.autograd.grad(phi(kernel, X, Y, W, .3), W)
    assert G.norm() < 1e-3 * W.norm()


@pytest.mark.parametrize("seed", range(5))
def test_no_ridge_makes_it_diverge(seed):
    X, Y = data(seed=seed)
    for ridge in (1e-10, 1e-6, 1e-2, 1., 100.):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning); m = stable(Gaussian(2.), iters=12, ridge=ridge).fit(X, Y)
        J = [h["objective"] for h in m.history]
        assert torch.isfinite(m.M).all() and all(b < a for a, b in zip(J, J[1:])) and float(m.M.trace()) <= 2 * J[0]


def test_gradient_of_a_wide_factor():
    X, Y = data(); W = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=X.dtype).requires_grad_()
    G, = torch.autograd.grad(phi(Gaussian(2.), X, Y, W, .3), W); W = W.detach()
    m = stable(Gaussian(2.), iters=0, ridge=.3).fit(X @ W.T, Y)                            # α at M = WᵀW
    C = Gaussian(2.).value_and_coef(X, None, metric(W))[1] * (m.alpha @ m.alpha.T)
    assert rel_err(G, gradient(W, X.T @ (C.sum(1).diag() - C) @ X)) < 1e-8


def test_nearest_keeps_the_metric_even_when_it_is_singular():
    g = torch.Generator().manual_seed(0); W = torch.randn(4, 4, generator=g, dtype=torch.float64)
    M = torch.diag(torch.tensor([2., 1., 0., 0.], dtype=torch.float64))
    assert rel_err(M, metric(nearest(W, M))) < 1e-12


def test_defect_sees_what_leads_out_of_the_range():
    M = torch.diag(torch.tensor([1., 0.], dtype=torch.float64)); S = torch.eye(2, dtype=torch.float64)
    assert defect(M, S) == 0 and defect(M, S + .3 * S.flip(0)) == pytest.approx(.3)


def test_float32_and_the_iterative_solver():
    X, Y = data(200)
    a = stable(Gaussian(2.), iters=4, ridge=.3).fit(X, Y)
    b, c = stable(Gaussian(2.), iters=4, ridge=.3).fit(X.float(), Y.float()), stable(Gaussian(2.), iters=4, ridge=.3, solver="iterative", tol=1e-9).fit(X, Y)
    assert rel_err(a.M, b.M.double()) < .02 and rel_err(a.M, c.M) < .02


def test_an_accepted_first_trial_costs_one_fit():
    "The trial's fit is the next iteration's: no metric is solved twice."
    import fact_nb.machines.rfm as rfm
    X, Y = data(); count, real = [], rfm.fit_alpha
    rfm.fit_alpha = lambda s, p, M, *a, **k: count.append(M) or real(s, p, M, *a, **k)
    try: m = stable(Gaussian(2.), iters=6, ridge=.3, settle=0.).fit(X, Y)
    finally: rfm.fit_alpha = real
    assert len(count) == 1 + sum(h["trials"] for h in m.history) and len({id(M) for M in count}) == len(count)


def test_old_checkpoints_of_other_updates_stay_valid():
    X, Y = data(); p = problem(X, Y)
    same = lambda **kw: fingerprint(identity_of(Settings(**kw), p))
    assert same(settle=.5) == same()
    assert same(update="stable", settle=.5) != same(update="stable")


def test_classifier():
    X, Y = data(150); y = (Y[:, 1] > 0).numpy()
    with pytest.raises(ValueError, match="normalize=None"): RFMClassifier(update="stable").fit(X.numpy(), y)
    est = RFMClassifier(update="stable", normalize=None, iters=20, ridge=.1).fit(X.numpy(), y)
    J = [h["objective"] for h in est.rfm_.history]
    assert all(b < a for a, b in zip(J, J[1:])) and est.score(X.numpy(), y) > .95 and est.feature_importances_[:2].sum() > .8


KILLED = """
import sys, time, torch
import fact_nb.machines.rfm as rfm
from fact_nb.machines.kernels import Gaussian
g = torch.Generator().manual_seed(0); X = torch.randn(60, 5, generator=g, dtype=torch.float64); Y = torch.sin(2 * X[:, :1])
save = rfm.save_state
def slow(*a): save(*a); time.sleep(.03)
rfm.save_state = slow
rfm.RFM(Gaussian(2.), update="stable", normalize=None, iters=15, ridge=.01, settle=0., progress=False).fit(X, Y, checkpoint=sys.argv[1])
"""


def test_killed_and_resumed(tmp_path):
    "kill -9 at random moments; the resumed run gives the same matrix, bit for bit."
    path, rng = tmp_path / "c", random.Random(0)
    for _ in range(3):
        p = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], env=os.environ | dict(OMP_NUM_THREADS="1"))
        start = time.time()
        while not path.exists() and p.poll() is None and time.time() - start < 60: time.sleep(.01)
        time.sleep(rng.random() * .2); p.send_signal(signal.SIGKILL); p.wait()
    g = torch.Generator().manual_seed(0); X = torch.randn(60, 5, generator=g, dtype=torch.float64); Y = torch.sin(2 * X[:, :1])
    kw = dict(iters=15, ridge=.01, settle=0.)
    assert path.exists()
    assert torch.equal(stable(Gaussian(2.), **kw).fit(X, Y, checkpoint=path).M, stable(Gaussian(2.), **kw).fit(X, Y).M)


def test_with_enough_pairs_the_last_iterate_is_as_good_as_any():
    cfg = replace(presets["cpu"], fraction=.8)
    stored = read_record(ROOT / "results/stable/cpu/task=modular,p=31,fraction=0.8,ridge=1,seed=0.json")["rows"]
    old = [r for r in stored if r["update"] == "stable"]
    new = follow_update(cfg, make(cfg, "modular", 0, torch.device("cpu")), 1., "stable")
    assert [r["objective"] for r in new[:10]] == pytest.approx([r["objective"] for r in old[:10]], rel=1e-6)
    assert new[-1]["accuracy"] == old[-1]["accuracy"] == max(r["accuracy"] for r in stored) == 1. and len(new) == 51
    assert min(r["accuracy"] for r in stored if r["update"] == "plain" and r["iter"] > 30) < .5             # what early stopping is for
