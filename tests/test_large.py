"""Large tables: every option changes what it should, memory is bounded, a dying worker changes nothing."""
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from fact_nb.machines.kernels import Gaussian, Laplace, Quadratic
from fact_nb.machines.large import (WORTH_LEAVES, Centres, DaskRows, GramProduct, LargeSettings, LeafPredictor, Rows, centres_core, fit_large,
                                    fit_leaves, kept_rows, leaf_size, plan_large)

SMALL = LargeSettings(rows=600, centres=200, iters=2, leaves=False, progress=False)


def table(n=3000, d=6):
    g = torch.Generator().manual_seed(0)
    X = torch.randn(n, d, generator=g)
    return X, torch.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + .2 * torch.randn(n, generator=g)


def r2(F, y):
    return 1 - float((F[:, 0] - y).square().mean() / y.var())


@pytest.fixture(scope="module")
def fitted():
    X, y = table()
    return fit_large(X[:2500], y[:2500], SMALL)


def test_learns_and_says_what_it_did(fitted):
    X, y = table()
    assert r2(fitted.predict(X[2500:]), y[2500:]) > .8
    assert fitted.best_iter > 0 and fitted.M.diagonal()[:3].sum() > .6 * fitted.M.trace()
    assert "200 centres" in fitted.note and "held-out rows" in fitted.note
    assert [(h["t"], h["ridge"]) for h in fitted.history if h["step"] == "learn"] == [
        (t, r) for r in (.3, .03) for t in range(3)]


@pytest.mark.parametrize("change", [dict(seed=1), dict(centres=50), dict(learn_ridges=(30.,)), dict(iters=0),
                                    dict(ridges=(100.,)), dict(kernel=Laplace(.5)), dict(leaves=True),
                                    dict(rows=300), dict(tol=.5), dict(steps=1), dict(others=())],
                         ids=str)
def test_every_option_changes_the_outcome(fitted, change):
    X, y = table()
    other = fit_large(X[:2500], y[:2500], replace(SMALL, **change))
    assert (other.predict(X[2500:]) - fitted.predict(X[2500:])).abs().max() > 1e-4


def test_the_error_that_is_asked_for_decides():
    X, y = table()
    labels = torch.stack([y > 0, y <= 0], 1).float() - .5
    by_label = fit_large(X, labels, replace(SMALL, metric="error"))
    assert all(h["error"] * 300 == pytest.approx(round(h["error"] * 300)) for h in by_label.history)


def test_memory_decides_how_many_centres_and_what_is_kept():
    X, y = table()
    with pytest.raises(MemoryError, match="raise memory="):
        fit_large(X, y, replace(SMALL, memory=1e8))
    firm = replace(SMALL, ridges=(3.,))         # with a small ridge the far points are hardly determined
    roomy, tight = (fit_large(X[:2500], y[:2500], replace(firm, memory=m)) for m in (None, 4.065e8))
    assert "made anew" in tight.note and "kept in memory" in roomy.note
    assert (tight.predict(X[2500:]) - roomy.predict(X[2500:])).abs().max() < .02
    k, keep = plan_large(10**6, LargeSettings(), int(1.2e9))
    assert 12 * k * k + 8 * 4000**2 + 3 * 2**27 <= 1.2e9 and not keep


def test_one_target_with_noise_only_keeps_the_identity_or_predicts_little():
    X, _ = table()
    noise = torch.randn(3000, generator=torch.Generator().manual_seed(5))
    fit = fit_large(X, noise, SMALL)
    assert fit.ridge >= max(SMALL.ridges)
    assert fit.predict(X).var() < .5


def test_held_out_rows_are_in_no_sum():
    X, y = table(50)
    rows = Rows(X, y[:, None], torch.tensor([0, 7, 49]))
    seen = torch.cat([x for x, _ in rows.blocks(8)])
    assert len(seen) == 47 and not any((seen == X[i]).all(1).any() for i in (0, 7, 49))
    assert kept_rows(X[:5], y[:5], torch.tensor([9]), 0)[0] is not None


def test_centres_core_refuses_inner_products():
    X, y = table(20)
    with pytest.raises(ValueError, match="radial"):
        centres_core(Quadratic(), X, y[:, None], X[:3], y[:3, None], 1.)


@pytest.mark.parametrize("seed", range(3))
def test_centres_core_is_the_derivative(seed):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)
    X, Y, Z, k, rho = rand(40, 3), rand(40, 2), rand(9, 3), Gaussian(1.7), .5

    def J(M):
        K, Km = k(X, Z, M), k(Z, None, M)
        B = torch.linalg.solve(K.T @ K + rho * Km, K.T @ Y)
        return B, (Y - K @ B).square().sum() + rho * (B * (Km @ B)).sum()

    M, D = torch.eye(3).double(), rand(3, 3)
    D = D + D.T
    slope = (J(M + 1e-5 * D)[1] - J(M - 1e-5 * D)[1]) / 2e-5
    S = centres_core(k, X, Y, Z, J(M)[0], rho, M)
    assert abs(float(slope + rho * (S * D).sum())) < 1e-6 * abs(float(slope))


KILLED = """
import sys, torch
from fact_nb.machines import large
from fact_nb.machines.large import LargeSettings, fit_large
g = torch.Generator().manual_seed(0)
X = torch.randn(3000, 6, generator=g)
y = torch.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2]
s = LargeSettings(rows=600, centres=200, iters=2, leaves=False, progress=False)
work = large._solve_large
def slow(run):
    print("here", flush=True)
    if sys.argv[2] == "wait":
        import time; time.sleep(60)
    work(run)
large._solve_large = slow
fit = fit_large(X, y, s, sys.argv[1])
torch.save(fit.predict(X[:50]), sys.argv[1] + ".out")
"""


def test_kill_minus_nine_loses_one_step(tmp_path):
    path, whole = str(tmp_path / "run.pt"), str(tmp_path / "whole.pt")
    first = subprocess.Popen([sys.executable, "-c", KILLED, path, "wait"], stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "here\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    for p in (path, whole):
        subprocess.run([sys.executable, "-c", KILLED, p, "go"], check=True, stdout=subprocess.DEVNULL, timeout=120)
    a, b = (torch.load(p + ".out") for p in (path, whole))
    assert torch.equal(a, b)


def test_a_killed_worker_changes_nothing(monkeypatch):
    "Two workers on chunks; one is killed while it adds up the third sum."
    distributed = pytest.importorskip("distributed")
    import dask.array as da
    X, y = table()
    chunked = [da.from_array(a.numpy(), chunks=(500, *a.shape[1:])) for a in (X, y)]
    s, total, calls = replace(SMALL, iters=0, steps=6), DaskRows.total, []

    def killing(rows, work, *more):
        calls.append(work)
        if len(calls) == kill_at:
            threading.Timer(.02, os.kill, (victim, signal.SIGKILL)).start()
        return total(rows, work, *more)

    monkeypatch.setattr(DaskRows, "total", killing)
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, \
            distributed.Client(cluster):
        victim, kill_at = cluster.workers[0].pid, -1
        first, kill_at = fit_large(*chunked, s), len(calls) + 3
        second = fit_large(*chunked, s)
        assert len(calls) > kill_at and cluster.workers[0].pid != victim
        lazy = second.predict(chunked[0])
        assert isinstance(lazy, da.Array)
        F = torch.from_numpy(lazy[:500].compute())
    assert (second.predict(X) - first.predict(X)).abs().max() < 1e-5
    assert (F - first.predict(X[:500])).abs().max() < 1e-4


def test_leaves_are_kept_only_if_they_help():
    X = table(4000)[0][:, :2]
    board = torch.sin(4 * X).prod(1, keepdim=True).sign()
    s = replace(SMALL, iters=0, centres=100, leaves=None)
    assert isinstance(fit_large(X, board, s).predictor, LeafPredictor)
    smooth = X[:, :1] + .5 * torch.randn(4000, 1, generator=torch.Generator().manual_seed(1))
    kept = fit_large(X, smooth, s)
    errors = lambda step: min(h["error"] for h in kept.history if h["step"] == step)
    assert isinstance(kept.predictor, LeafPredictor) == (errors("leaves") < WORTH_LEAVES * errors("predictor"))


@pytest.fixture
def soon(monkeypatch):
    "Estimators go the large way from 1,000 rows on, with small subsets."
    from fact_nb.machines import estimators, large
    monkeypatch.setattr(large, "LARGE_FROM", 1000)
    settings = lambda m, chosen=True, iters=None: replace(
        SMALL, metric=m.metric, seed=m.seed, iters=SMALL.iters if iters is None else iters)
    monkeypatch.setattr(estimators, "large_settings", settings)


def test_estimators_go_this_way_by_themselves(soon, capsys, tmp_path):
    from fact_nb import RFMClassifier, RFMRegressor
    X, y = (a.numpy() for a in table())
    r = RFMRegressor(verbose=1, random_state=0).fit(X[:2500], y[:2500])
    assert "200 centres" in capsys.readouterr().out
    assert r.score(X[2500:], y[2500:]) > .8 and r.n_iter_ == r.rfm_.best_iter
    r.save(tmp_path / "r.npz")
    assert (RFMRegressor.load(tmp_path / "r.npz").predict(X) == r.predict(X)).all()
    c = RFMClassifier(random_state=0).fit(X[:2500], y[:2500] > 0)
    assert c.score(X[2500:], y[2500:] > 0) > .85 and 1 <= c.sharpness_ <= 60
    steps = [h["t"] for h in RFMRegressor(iters=1).fit(X[:2500], y[:2500]).rfm_.history if h["step"] == "learn"]
    assert steps == [0, 1, 0, 1]                                # the updates that were asked for
    few = RFMRegressor(iters=0, ridge=.1).fit(X[:900], y[:900])
    named = RFMRegressor(iters=0, ridge=.1, solver="direct").fit(X[:1100], y[:1100])
    weighted = RFMRegressor(iters=0, ridge=.1).fit(X[:1100], y[:1100], sample_weight=y[:1100]**2)
    assert all(type(m.rfm_).__name__ == "RFM" for m in (few, named, weighted))


def test_settings_of_a_machine_carry_over():
    from fact_nb import RFM
    from fact_nb.machines.large import large_settings
    s = large_settings(RFM(Gaussian(2.), ridge=.7, memory=5e9, seed=3, metric="error", iters=0))
    assert (s.kernel, s.ridges, s.memory, s.seed, s.metric, s.iters) == (Gaussian(2.), (.7,), 5e9, 3, "error", 0)


def test_leaves_have_the_size_that_is_asked_for_and_end_with_all_rows():
    X = table(4000)[0][:, :2]
    board = torch.sin(4 * X).prod(1, keepdim=True).sign()
    s = replace(SMALL, iters=0, centres=100, leaves=None)
    big, small = (fit_large(X, board, replace(s, leaf=leaf)).predictor for leaf in (2000, 500))
    assert (len(big.parts), len(small.parts)) == (2, 8)
    assert sum(len(p.X) for p in small.parts) == 4000             # those that were held out too
    assert leaf_size(21_000, s) > 2 * leaf_size(250_000, s) == 8000


def test_leaves_that_do_not_help_are_given_up_after_an_eighth():
    X, y = table(4000)
    base = fit_large(X, y, replace(SMALL, iters=0)).predictor
    seen = []
    look = lambda kept: lambda found: seen.append(sum(p is not None for p in found[0].parts)) or found[:kept]
    assert fit_leaves(base, X, y[:, None], 250, (.1, 1.), look(0)) == []
    whole, = fit_leaves(base, X, y[:, None], 250, (.1, 1.), look(1))
    assert seen == [2, 2] and None not in whole.parts and whole.ridge == .1


def test_a_kept_kernel_is_rounded_and_the_answer_is_not():
    X, y = table()
    c = Centres(Laplace(3.), torch.eye(6), X[:200])
    rows = Rows(X, y[:, None])
    kept, anew = (GramProduct(rows, c, keep) for keep in (True, False))
    assert kept.kept[0].dtype == torch.float16
    V = torch.randn(1, 200, generator=torch.Generator().manual_seed(1)).double()
    a, b = kept(V), anew(V)
    assert 0 < (a - b).norm() < 1e-3 * b.norm() and (kept.rhs - anew.rhs).norm() < 1e-5 * anew.rhs.norm()
    wide = GramProduct(rows, replace(c, kernel=Quadratic()), True)
    assert wide.kept[0].dtype == torch.float32                    # its values may be large


def test_a_kernel_without_full_rank_is_fitted():
    X, y = table(d=20)
    fit = fit_large(X[:2500], y[:2500], replace(SMALL, kernel=Quadratic(), others=(), centres=400))
    assert r2(fit.predict(X[2500:]), y[2500:]) > .3             # the product is seen, the sine is not


def test_leaves_predict_on_a_cluster_too():
    da = pytest.importorskip("dask.array")
    X, y = table()
    fit = fit_large(X[:2500], y[:2500], replace(SMALL, leaves=True))
    lazy = fit.predict(da.from_array(X[2500:].numpy(), chunks=(200, 6)))
    assert lazy.shape == (500, 1)
    off = torch.from_numpy(lazy.compute()) - fit.predict(X[2500:])
    assert off.norm() < 1e-3 * fit.predict(X[2500:]).norm()     # blocks of rows round in float32
