"Properties and faults of the Recursive Feature Machine: many seeds, bad input, killed processes."
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fact_nb.linalg import psd_power, rel_err
from fact_nb.machines.kernels import ExpPower, Exponential, Gaussian, Laplace, Polynomial, Quadratic
from fact_nb.machines.gradients import kernel_agop, agop_core, kernel_fact, fact_core
from fact_nb.machines.rfm import RFM
from fact_nb.machines.updates import effective_rank

KERNELS = [Laplace(2.), Gaussian(2.), ExpPower(2., 1.4), Quadratic(), Polynomial(3, 1.), Exponential(4.)]
ids = lambda k: type(k).__name__


def data(n=60, d=5, c=2, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=g, dtype=dtype)
    Y = torch.stack([torch.sin(2 * X[:, 0]), X[:, 0] * X[:, 1], X[:, 2]][:c], 1)
    return X, Y


def k_of(kernel, x, z, M):
    "The kernel between two points, from torch alone."
    r2, t = (x - z) @ M @ (x - z), x @ M @ z
    return {Laplace: lambda: (-r2.sqrt() / 2).exp(), Gaussian: lambda: (-r2 / 8).exp(), ExpPower: lambda: (-(r2 / 4)**.7).exp(),
            Quadratic: lambda: t**2, Polynomial: lambda: (t + 1)**3, Exponential: lambda: (t / 4).exp()}[type(kernel)]()


def gradient(kernel, X, i, j, M):
    if i == j and kernel.radial: return torch.zeros_like(X[0])
    x = X[i].clone().requires_grad_()
    return torch.autograd.grad(k_of(kernel, x, X[j], M), x)[0]


@pytest.mark.parametrize("kernel", KERNELS, ids=ids)
@pytest.mark.parametrize("seed", range(4))
def test_fact_and_agop_equal_their_definitions(kernel, seed):
    g = torch.Generator().manual_seed(seed)
    n, d, c = (int(torch.randint(a, b, (), generator=g)) for a, b in ((2, 9), (1, 5), (1, 4)))
    X, a, W = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((n, d), (n, c), (d, d)))
    M = W.T @ W / d
    D = torch.stack([torch.stack([gradient(kernel, X, i, j, M) for j in range(n)]) for i in range(n)])     # n × n × d
    assert rel_err(torch.einsum("ijp,jc,ic,iq->pq", D, a, a, X), kernel_fact(kernel, X, a, M)) < 1e-9
    J = torch.einsum("ijp,jc->icp", D, a)
    assert rel_err(torch.einsum("icp,icq->pq", J, J) / n, kernel_agop(kernel, X, a, M)) < 1e-9


@pytest.mark.parametrize("kernel", KERNELS, ids=ids)
def test_strips_make_no_difference(kernel):
    "n above the strip height, upper triangle only, stored or recomputed, product or Gram."
    X, _ = data(300, 4); a = torch.randn(300, 3, generator=torch.Generator().manual_seed(1), dtype=X.dtype)
    C = kernel.value_and_coef(X)[1]; H = C * (a @ a.T)
    S = X.T @ (H.sum(1).diag() - H) @ X if kernel.radial else X.T @ H @ X
    strip = lambda i, e: kernel.value_and_coef(X[i:e], X[i:])[1]
    for source in (C, C.triu(), strip): assert rel_err(S, fact_core(source, a, X, kernel.radial)) < 1e-8
    T = agop_core(C.clone(), a, X, kernel.radial, form="product")
    assert rel_err(T, agop_core(C.triu(), a, X, kernel.radial, form="gram")) < 1e-9
    assert rel_err(T, agop_core(strip, a, X, kernel.radial)) < 1e-8


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.radial], ids=ids)
@pytest.mark.parametrize("kw", [dict(), dict(geometric=False), dict(update="nfa", power=.5), dict(diagonal=True)], ids=str)
def test_shifted_inputs_change_nothing_for_radial_kernels(kernel, kw):
    X, Y = data()
    a, b = (RFM(kernel, iters=2, ridge=.1, progress=False, **kw).fit(Z, Y) for Z in (X, X + 100))
    assert rel_err(a.M, b.M) < 1e-5


def test_shifted_inputs_matter_for_inner_products():
    X, Y = data()
    a, b = (RFM(Exponential(10.), iters=2, ridge=.1, progress=False).fit(Z, Y) for Z in (X, X + 1))
    assert rel_err(a.M, b.M) > .01


def test_rotating_the_inputs_rotates_M():
    X, Y = data(); Q = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(3), dtype=X.dtype))[0]
    for kw in (dict(), dict(geometric=False), dict(update="nfa", power=1.)):
        a, b = (RFM(Gaussian(3.), iters=3, ridge=1e-2, progress=False, **kw).fit(Z, Y) for Z in (X, X @ Q))
        assert rel_err(Q.T @ a.M @ Q, b.M) < 1e-6
        assert rel_err(a.predict(X), b.predict(X @ Q)) < 1e-6


def test_ridge_zero_is_allowed_and_interpolates():
    X, Y = data(40)
    m = RFM(Laplace(3.), iters=2, ridge=0., progress=False).fit(X, Y)
    assert torch.isfinite(m.M).all() and rel_err(Y, m.predict(X)) < 1e-6


def test_history_says_everything():
    X, Y = data(); m = RFM(Laplace(3.), iters=2, progress=False).fit(X, Y, X[:5], Y[:5])
    for h in m.history:
        assert {"iter", "train_error", "val_error", "objective", "trace", "effective_rank", "solver", "note", "residual", "seconds"} <= set(h)
        assert h["solver"] and np.isfinite(h["objective"]) and 1 <= h["effective_rank"] <= 5 + 1e-9
    assert effective_rank(m.M) == pytest.approx(m.history[-1]["effective_rank"], rel=1e-5)


# bad input

def quiet(**kw): return RFM(**(dict(kernel=Laplace(2.), iters=2, ridge=1e-3, progress=False) | kw))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf(bad):
    X, Y = data(); X2, Y2 = X.clone(), Y.clone(); X2[3, 1] = bad; Y2[3, 1] = bad
    for args in ((X2, Y), (X, Y2), (X, Y, X2, Y), (X, Y, X, Y2)):
        with pytest.raises(ValueError, match="nan or inf"): quiet().fit(*args)
    with pytest.raises(ValueError, match="nan or inf"): quiet().fit(X, Y).predict(X2)


def test_one_row():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)                    # nothing to learn a metric from
        m = quiet(ridge=0.).fit(torch.ones(1, 3), torch.tensor([2.]))
    assert m.predict(torch.ones(2, 3)).tolist() == pytest.approx([2., 2.])


def test_duplicate_rows_count_twice():
    X, Y = data(); w = torch.ones(60); w[:20] = 2
    a = quiet(ridge=.1).fit(torch.cat([X, X[:20]]), torch.cat([Y, Y[:20]])); b = quiet(ridge=.1).fit(X, Y, sample_weight=w)
    assert rel_err(a.M, b.M) < 1e-8


def test_constant_columns_get_no_weight():
    X, Y = data(); m = quiet(iters=3).fit(torch.cat([X, torch.full((60, 1), 7., dtype=X.dtype)], 1), Y)
    assert torch.isfinite(m.M).all() and m.M[-1].abs().max() < 1e-9 * m.M.max()


def test_more_inputs_than_rows():
    g = torch.Generator().manual_seed(0); X = torch.randn(20, 50, generator=g, dtype=torch.float64); y = X[:, 0].sign()
    for kw in (dict(), dict(update="nfa", power=.5), dict(geometric=False)):
        m = quiet(kernel=Laplace(10.), **kw).fit(X, y)
        assert torch.isfinite(m.M).all() and (m.predict(X).sign() == y).all()


def test_object_arrays_and_strings():
    with pytest.raises(TypeError, match="numbers only"): quiet().fit(np.array([["a"], ["b"]], dtype=object), [1., 2.])
    with pytest.raises(TypeError, match="RFMClassifier"): quiet().fit(torch.ones(2, 1), np.array(["a", "b"], dtype=object))


def test_constant_targets_keep_the_first_metric():
    X, _ = data()
    with pytest.warns(RuntimeWarning, match="constant"): m = quiet().fit(X, torch.zeros(60))
    assert torch.equal(m.M, torch.eye(5, dtype=X.dtype)) and (m.predict(X) == 0).all()


def test_singular_kernel_at_ridge_zero():
    "Duplicate rows and ridge 0: an error, or a warning and a right answer; never silence and nonsense."
    X, Y = data(30); X, Y = torch.cat([X, X]), torch.cat([Y, Y])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try: m = quiet(ridge=0., iters=1).fit(X, Y)
        except (ValueError, torch.linalg.LinAlgError) as e: assert "ridge" in str(e); return
    assert caught and rel_err(Y, m.predict(X)) < 1e-4


# killed processes

SCRIPT = """
import sys, torch
from fact_nb.machines.kernels import Laplace
from fact_nb.machines.rfm import RFM
torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
X = torch.randn(350, 6, generator=g, dtype=torch.float64); y = torch.sin(2 * X[:, 0]) * X[:, 1]
print("started", flush=True)
m = RFM(Laplace(3.), iters=40, ridge=1e-2, progress=False).fit(X, y, X[:50], y[:50], checkpoint=sys.argv[1] if len(sys.argv) > 2 else None)
torch.save(dict(M=m.M, alpha=m.alpha, val=[h["val_error"] for h in m.history]), sys.argv[-1])
"""


def test_killed_runs_resume_to_the_same_bits(tmp_path):
    "SIGKILL at random moments; whatever was written is whole, and the end is that of an undisturbed run."
    env = dict(os.environ, OMP_NUM_THREADS="1")
    run = lambda *a: subprocess.Popen([sys.executable, "-c", SCRIPT, *map(str, a)], stdout=subprocess.PIPE, env=env, text=True)
    straight, resumed, check = tmp_path / "straight", tmp_path / "resumed", tmp_path / "check"
    assert run(straight).wait(120) == 0
    rng, kills, grown = random.Random(0), 0, []
    for _ in range(3):
        p = run(check, resumed); assert p.stdout.readline().strip() == "started"
        time.sleep(rng.uniform(.05, .35))
        if p.poll() is None: p.send_signal(signal.SIGKILL); kills += 1
        p.wait(60)
        if check.exists(): grown.append(torch.load(check, weights_only=True)["state"]["t"])
    assert kills >= 1 and grown == sorted(grown)
    assert run(check, resumed).wait(120) == 0
    a, b = (torch.load(f, weights_only=True) for f in (straight, resumed))
    assert torch.equal(a["M"], b["M"]) and torch.equal(a["alpha"], b["alpha"]) and a["val"] == b["val"]


def one_target():
    X, Y = data(n=40, d=3)
    return X, Y[:, 0]


def test_frames_and_series_are_read_by_position():
    X, y = one_target()
    F = pd.DataFrame(X.numpy(), index=range(100, 100 + len(X)))
    s = pd.Series(y.numpy(), index=range(len(y))[::-1])
    w = pd.Series(np.linspace(.5, 1.5, len(y)), index=range(len(y))[::-1])
    plain = quiet().fit(X, y, X, y, sample_weight=torch.tensor(w.to_numpy()))
    framed = quiet().fit(F, s, F, s, sample_weight=w)
    assert torch.equal(plain.M, framed.M) and torch.equal(plain.predict(X), framed.predict(F)) and framed.alpha.ndim == 1
    assert quiet().fit(F, s.to_frame()).alpha.ndim == 2
    mixed = F.assign(flag=[True, False] * (len(F) // 2))
    assert quiet().fit(mixed, s).M.shape == (X.shape[1] + 1,) * 2
    with pytest.raises(TypeError, match="X must hold numbers only: encode strings"): quiet().fit(F.assign(word="a"), s)
    with pytest.raises(ValueError, match="contains nan or inf: impute"): quiet().fit(F.assign(gap=pd.array([None] * len(F), dtype="Int64")), s)
    with pytest.raises(TypeError, match="sample_weight must hold numbers only"): quiet().fit(X, y, sample_weight=["a"] * len(y))


@pytest.mark.parametrize("kw, error, message", [
    (dict(ridge="small"), TypeError, "ridge must be a number ≥ 0, not 'small': it is nλ"), (dict(ridge=True), TypeError, "ridge must be a number"),
    (dict(memory="4GB"), TypeError, "not '4GB': give bytes, such as memory=4e9 for 4 GB"), (dict(memory=-1), ValueError, "memory must be a positive number"),
    (dict(iters=2.5), ValueError, "iters must be a whole number"), (dict(power="a"), TypeError, "power must be a positive number"),
    (dict(holdout=1), ValueError, "a share of the rows, such as .2"), (dict(patience=1.5), ValueError, "patience must be a whole number ≥ 1"),
    (dict(tol="a"), TypeError, "tol must be a number"), (dict(seed=.5), ValueError, "seed must be a whole number"),
    (dict(diagonal="yes"), ValueError, "diagonal must be one of"), (dict(settle=-1), ValueError, "settle must be a number ≥ 0"),
    (dict(patience=2), ValueError, "set holdout=.2, keep='loo' or normalize=None; RFM.fit also takes X_val")])
def test_a_wrong_setting_is_named(kw, error, message):
    with pytest.raises(error, match=message): RFM(**kw).fit(*one_target())


def test_numpy_numbers_are_numbers():
    X, y = one_target()
    assert torch.equal(quiet(iters=np.int64(1), ridge=np.float64(.1)).fit(X, y).M, quiet(iters=1, ridge=.1).fit(X, y).M)


def test_other_files_are_no_checkpoints(tmp_path):
    X, y = one_target()
    go = lambda path: quiet(kernel=Laplace(2.), iters=1).fit(X, y, checkpoint=path)
    go(tmp_path / "new" / "c.pt")                                            # the folder is made
    state = torch.load(tmp_path / "new" / "c.pt", weights_only=True)
    torch.save(state | dict(state=dict(x=1)), tmp_path / "old.pt")
    torch.save([1], tmp_path / "list.pt")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    with pytest.raises(ValueError, match="another version wrote it.: delete it to start afresh"): go(tmp_path / "old.pt")
    with pytest.raises(ValueError, match="not a checkpoint of this library: delete it to start afresh"): go(tmp_path / "list.pt")
    with pytest.raises(ValueError, match="not a readable checkpoint .*: delete it"): go(tmp_path / "junk.pt")
    with pytest.raises(ValueError, match="is a folder: give the name of a file in it"): go(tmp_path)
