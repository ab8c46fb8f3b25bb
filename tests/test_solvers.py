"Direct and iterative solvers against dense references, the fallbacks with their warnings, grids, memory, and bad input."
import math
import warnings

import numpy as np
import pytest
import torch

from fact_nb.linalg import rel_err
from fact_nb.machines.direct import cho_solve, cholesky_, eig_solve, refine_, restore_, shift_solve, shift_steps, solve, solve_grid, sym_matmul
from fact_nb.machines.iterative import KernelProduct, Nystrom, cg, default_rank, partial_cholesky, refine_rounds, solve_iterative
from fact_nb.machines.kernels import Exponential, Gaussian, Laplace, LowRank, Quadratic, kernel_matmul, median_bandwidth
from fact_nb.machines.solvers import available_memory, choose, direct_bytes, iterative_bytes, solve_kernel, solve_kernel_grid

F64 = torch.float64


def data(n=300, d=5, c=3, seed=0, dtype=F64):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=g, dtype=F64)
    return X.to(dtype), torch.stack([(X @ torch.randn(d, generator=g, dtype=F64)).sin() for _ in range(c)], 1).to(dtype)


def dense(K, Y, ridge): return torch.linalg.solve(K + ridge * torch.eye(len(K), dtype=K.dtype), Y)


def quiet(f):
    "Result and warnings."
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        return f(), [str(x.message) for x in w]


# direct

@pytest.mark.parametrize("n, block", [(1, 8), (7, 8), (8, 8), (9, 8), (100, 33), (300, None)])
def test_cholesky_in_place(n, block):
    K = Laplace(2.)(data(n)[0]); A, diag = K.clone(), K.diagonal().clone()
    A[tuple(torch.tril_indices(n, n, -1))] = float("nan")  # the lower triangle is never read
    assert cholesky_(A, diag, .1, block) == 0
    assert (A.tril() - torch.linalg.cholesky(K + .1 * torch.eye(n, dtype=F64))).abs().max() < 1e-12
    assert torch.equal(A.triu(1), K.triu(1))
    V = torch.randn(n, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    assert torch.allclose(sym_matmul(A, diag, V), K @ V, atol=1e-11) and torch.allclose(cho_solve(A, V), dense(K, V, .1), atol=1e-9)
    assert torch.equal(restore_(A, diag), K)


@pytest.mark.parametrize("bad", [1, 40, 100])
def test_cholesky_names_the_column_and_keeps_the_matrix(bad):
    K = torch.eye(100, dtype=F64); K[bad - 1, bad - 1] = -1
    A = K.clone(); diag = A.diagonal().clone()
    assert cholesky_(A, diag, 0., block=32) == bad
    assert torch.equal(restore_(A, diag), K)


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-3), (F64, 1e-10)])
@pytest.mark.parametrize("ridge", [1e-2, 1., 100.])
def test_solve(dtype, tol, ridge):
    X, Y = data(); K = Laplace(2.)(X); want = dense(K, Y, ridge)
    s = solve(K.to(dtype), Y.to(dtype), ridge, overwrite=False)
    assert s.alpha.dtype == dtype and rel_err(want, s.alpha) < tol and s.method == "cholesky" and s.ridge == ridge and s.residual < tol and s.seconds > 0
    y = solve(K.to(dtype), Y[:, 0].to(dtype), ridge, overwrite=False)
    assert y.alpha.shape == (300,) and rel_err(want[:, 0], y.alpha) < tol


def test_overwrite_and_triangle():
    X, Y = data(); K = Laplace(2.)(X)
    A = K.clone(); solve(A, Y, .1, overwrite=False); assert torch.equal(A, K)
    a = solve(A, Y, .1).alpha; assert not torch.equal(A, K) and torch.equal(A.triu(), K.triu())
    assert torch.equal(solve(A, Y, .1).alpha, a)  # the upper triangle still is K
    assert rel_err(dense(K, Y, .1), a) < 1e-10 and rel_err(a, solve(K.triu(), Y, .1).alpha) < 1e-14


def test_refine_recovers_double_precision():
    X, Y = data(); K = Gaussian(1.)(X); want = dense(K, Y, 1e-2)
    single = solve(K.float(), Y.float(), 1e-2, overwrite=False)
    s = solve(K, Y, 1e-2, refine=True, overwrite=False)
    assert s.method == "cholesky32+cg" and s.alpha.dtype == F64 and s.iterations > 0 and "refinement" in s.note
    assert rel_err(want, s.alpha) < 1e-9 < 1e-5 < rel_err(want, single.alpha) * 100
    # float32 cannot factor this at all; the answer is still right, and the note says what happened
    hard = Gaussian(10.)(X); s, _ = quiet(lambda: solve(hard, Y, 1e-7, refine=True, overwrite=False))
    assert "float32 was not enough" in s.note and s.method == "cholesky" and s.residual < 1e-6


def test_fallbacks_say_so_and_add_no_ridge():
    X, Y = data(dtype=torch.float32); K = Gaussian(10.)(X)
    seen = set()
    for ridge in (1e-3, 1e-5, 1e-6, 1e-9):
        s, w = quiet(lambda: solve(K, Y, ridge, overwrite=False))
        seen.add(s.method); assert s.ridge == ridge and torch.isfinite(s.alpha).all()
        if s.method != "cholesky": assert "no ridge was added" in w[0] and s.note
        if s.method == "cholesky64": assert rel_err(dense(K.double(), Y.double(), ridge), s.alpha) < 1e-5   # exactly the ridge asked for
        if s.method == "eigh": assert "minimum norm" in s.note
        with pytest.raises(ValueError, match="raise the ridge") if s.method != "cholesky" else warnings.catch_warnings(): solve(K, Y, ridge, method="cholesky", overwrite=False)
    assert "eigh" in seen and len(seen) >= 2


def test_indefinite_matrix_is_solved_as_asked():
    K = torch.diag(torch.tensor([2., 1., -.5], dtype=F64)); Y = torch.ones(3, dtype=F64)
    s, w = quiet(lambda: solve(K, Y, .1, overwrite=False))
    assert torch.allclose(s.alpha, 1 / (K.diag() + .1)) and "not positive definite" in w[0]


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 2e-3), (F64, 1e-8)])
def test_singular_without_ridge_is_minimum_norm(dtype, tol):
    X, Y = data(60); X, Y = torch.cat([X, X]), torch.cat([Y, Y]); K = Laplace(2.)(X.to(dtype))
    s, w = quiet(lambda: solve(K, Y.to(dtype), 0., overwrite=False))
    assert s.method == "eigh" and "minimum norm" in w[0] and s.residual < tol
    half = dense(Laplace(2.)(X[:60]), Y[:60], 0.) / 2  # the shortest solution gives each copy half
    assert rel_err(torch.cat([half, half]), s.alpha) < tol
    with pytest.raises(ValueError, match="raise the ridge"): solve(K, Y.to(dtype), 0., method="cholesky", overwrite=False)
    r = solve(K, Y.to(dtype), .1, overwrite=False)  # with a ridge duplicates are no problem
    assert r.method == "cholesky" and rel_err(dense(Laplace(2.)(X), Y, .1), r.alpha) < tol


def test_regular_without_ridge_interpolates():
    X, Y = data(); s = solve(Laplace(2.)(X), Y, 0., overwrite=False)
    assert s.method == "cholesky" and rel_err(Y, Laplace(2.)(X) @ s.alpha) < 1e-10


@pytest.mark.parametrize("kernel", [Laplace(3.), Gaussian(3.), Exponential(10.)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("c", [1, 10])
def test_grid_equals_single(kernel, dtype, c):
    X, Y = data(900, 8, c, dtype=dtype); ridges = [10., .1, 1., .1, .11, .05]
    K = kernel(X)
    for r, s in zip(ridges, solve_grid(K, Y, ridges, overwrite=False)):
        one = solve(K, Y, r, method="cholesky", overwrite=False)
        assert s.ridge == r and rel_err(one.alpha, s.alpha) < (5e-3 if dtype == torch.float32 else 1e-8)
        assert s.residual < max(1e-11 if dtype == F64 else 1e-4, 5 * one.residual)


def test_grid_shares_factors_where_it_pays():
    X, Y = data(1500, 20, 1); sols = solve_grid(Laplace(6.)(X), Y, [.001, .01, .1])
    assert sum(s.method == "cholesky" for s in sols) < 3 and any("from the factor at ridge" in s.note for s in sols)
    assert all(s.method == "cholesky" for s in solve_grid(Laplace(6.)(X), Y, [.001, .01, .1], method="cholesky"))
    assert all(s.method == "cholesky" for s in solve_grid(Gaussian(20.)(X), Y, [1e-6, 1e-3, 1.]))  # too far apart for that spectrum


def test_shift_steps_bound_holds():
    X, Y = data(400, 6); K = Laplace(2.)(X); least = float(torch.linalg.eigvalsh(K)[0])
    A, diag = K.clone(), K.diagonal().clone(); cholesky_(A, diag, .1)
    for r in (.11, .5, 3.):
        _, res, k = shift_solve(A, Y, torch.full((3,), r - .1, dtype=F64), 1e-9, 200)
        assert (res <= 1e-9).all() and k <= 2 + 1.3 * shift_steps(least, .1, r, 1e-9)
    _, res, k = shift_solve(A, Y, torch.full((3,), 1e5, dtype=F64), 1e-14, 3); assert k == 3 and (res > 1e-14).all()  # short of steps: says so


def test_eigh_method_and_long_grid():
    X, Y = data(200); K = Laplace(2.)(X)
    for r, s in zip((.1, 1.), solve_grid(K, Y, (.1, 1.), method="eigh", overwrite=False)):
        assert s.method == "eigh" and rel_err(dense(K, Y, r), s.alpha) < 1e-10


@pytest.mark.parametrize("call, error, message", [
    (lambda K, Y: solve(K, Y, -1.), ValueError, "≥ 0"), (lambda K, Y: solve(K, Y, float("nan")), ValueError, "≥ 0"), (lambda K, Y: solve(K, Y, float("inf")), ValueError, "finite"),
    (lambda K, Y: solve(K, Y[:5], 1.), ValueError, "rows"), (lambda K, Y: solve(K, Y[:, :, None], 1.), ValueError, "rows"), (lambda K, Y: solve(K[:5], Y, 1.), ValueError, "square"),
    (lambda K, Y: solve(K[:0, :0], Y[:0], 1.), ValueError, "empty"), (lambda K, Y: solve(K.int(), Y, 1.), TypeError, "floating"), (lambda K, Y: solve(K, Y, 1., method="lu"), ValueError, "method"),
    (lambda K, Y: solve(K, Y * float("nan"), 1.), ValueError, "Y contains"), (lambda K, Y: solve(K * float("nan"), Y, 1.), ValueError, "K contains"),
    (lambda K, Y: solve(K, np.array(["a"] * len(K), dtype=object), 1.), TypeError, "numbers only"), (lambda K, Y: solve_grid(K, Y, []), ValueError, "empty")])
def test_bad_systems(call, error, message):
    X, Y = data(20); K = Laplace(2.)(X)
    with pytest.raises(error, match=message): call(K, Y)


@pytest.mark.parametrize("where", [(0, 0), (3, 7), (19, 19), (0, 19)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_anywhere_is_found(where, value):
    X, Y = data(20); K = Laplace(2.)(X); K[where] = K[where[::-1]] = value
    with pytest.raises(ValueError, match="nan or inf"): solve(K, Y, 1.)


# iterative

@pytest.mark.parametrize("kernel", [Laplace(2.), Gaussian(2.), Quadratic(), Exponential(10.)])
def test_product_and_columns(kernel):
    X, _ = data(513, 4); V = torch.randn(3, 513, generator=torch.Generator().manual_seed(0), dtype=F64)
    W = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), dtype=F64)
    for M in (None, LowRank(W), W.T @ W, W[0]**2):
        K = kernel(X, None, M); op = KernelProduct(kernel, X, M, tile=(50, 120))
        assert rel_err(V @ K, op(V)) < 1e-12 and rel_err(K[:, [1, 500]], op.columns(torch.tensor([1, 500]))) < 1e-7 and rel_err(K.diag(), op.diagonal()) < 1e-12
        assert rel_err(V @ K, KernelProduct(kernel, X, M, torch.float32)(V)) < 1e-5


def test_entries_are_counted():
    X, _ = data(400); op = KernelProduct(Laplace(2.), X, tile=(40, 80)); V = torch.ones(1, 400, dtype=F64)
    calls = []
    class Counting(Laplace):
        def k_(self, t): calls.append(t.numel()); return super().k_(t)
    op = KernelProduct(Counting(2.), X, tile=(40, 80)); op(V); op(V); op.columns(torch.arange(7))
    assert op.entries == sum(calls) and 2 * 400 * 200 + 2800 <= op.entries < 2 * 400 * 250 + 2800


def test_float64_residual_beats_float32_residual():
    X, Y = data(600, 5, 1); fast = KernelProduct(Laplace(5.), X, dtype=torch.float32); exact = KernelProduct(Laplace(5.), X, exact=True)
    rho = torch.full((1,), 1e-3, dtype=F64); pre = Nystrom(fast, 150)
    x, _, _ = cg(fast, pre, Y.T, rho, tol=1e-11, max_iter=300)
    true = float((Y.T - exact(x) - rho * x).norm() / Y.norm())
    _, res, _ = refine_rounds(fast, exact, pre, Y.T, rho, None, 1e-11, 500)
    assert float(res) <= 1e-11 < true  # conjugate gradients alone stop at float32's floor


@pytest.mark.parametrize("rank", [0, 1, 50, 10**6])
def test_any_rank(rank):
    X, Y = data(250); K = Laplace(2.)(X)
    s, = solve_iterative(Laplace(2.), X, Y, [.1], rank=rank, tol=1e-8)
    assert s.converged and rel_err(dense(K, Y, .1), s.alpha) < 1e-6


def test_partial_cholesky_bounds():
    X, _ = data(300, 2); K = Gaussian(3.)(X); op = KernelProduct(Gaussian(3.), X)
    F, left = partial_cholesky(op, 300)
    assert F.shape[1] < 300  # stops when nothing is left to explain
    assert float(torch.linalg.eigvalsh(K - F @ F.T).min()) > -1e-4 and left.min() >= 0
    assert torch.equal(F, partial_cholesky(KernelProduct(Gaussian(3.), X), 300)[0])  # a seed, not chance


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_iterative_equals_direct(dtype):
    X, Y = data(1200, 8, 2, dtype=dtype); kernel = Laplace(median_bandwidth(X)); T, _ = data(100, 8, seed=5, dtype=dtype)
    d, i = (solve_kernel(kernel, X, Y, .01, method=m) for m in ("direct", "iterative"))
    p, q = (kernel_matmul(kernel, T, X, None, s.alpha) for s in (d, i))
    assert d.method == "cholesky" and i.method == "cg" and i.alpha.dtype == dtype and i.entries > 0 and i.residual <= 1e-4 and (p - q).abs().max() < 1e-3 * p.abs().max()


def test_grid_advances_together():
    X, Y = data(900, 6, 2); kernel = Laplace(4.); ridges = [1e-3, 1e-2, .1, 1., 10.]
    together = solve_kernel_grid(kernel, X, Y, ridges, method="iterative")
    smallest = solve_kernel(kernel, X, Y, ridges[0], method="iterative")
    assert together[0].entries <= 1.5 * smallest.entries
    K = kernel(X)
    for r, s in zip(ridges, together): assert s.ridge == r and s.residual <= 1e-4 and rel_err(K @ dense(K, Y, r), K @ s.alpha) < 1e-3


def test_warm_start_and_single_target():
    X, Y = data(600, 5, 1); y = Y[:, 0]
    s = solve_kernel(Laplace(2.), X, y, .1, method="iterative", tol=1e-8); assert s.alpha.shape == (600,)
    again = solve_kernel(Laplace(2.), X, y, .1, method="iterative", alpha0=s.alpha, tol=1e-7); assert again.iterations == 0
    near = solve_kernel(Laplace(2.), X, y, .11, method="iterative", alpha0=s.alpha, tol=1e-8)
    assert near.iterations < s.iterations and rel_err(dense(Laplace(2.)(X), y, .11), near.alpha) < 1e-6
    with pytest.raises(ValueError, match="rows"): solve_kernel(Laplace(2.), X, y, .1, method="iterative", alpha0=s.alpha[:5])


def test_not_reached_warns_and_returns_best():
    X, Y = data(500, 5, 2)
    (s,), w = quiet(lambda: solve_iterative(Laplace(2.), X, Y, [1e-3], max_iter=3, rank=10))
    assert not s.converged and "did not reach the residual" in w[0] and "asked" in s.note
    (t,), _ = quiet(lambda: solve_iterative(Laplace(2.), X, Y, [1e-3], max_iter=12, rank=10))
    assert t.residual < s.residual <= 1  # never worse than zero


def test_float32_breakdown_goes_on_in_float64():
    X, Y = data(400, 4, 1); kernel = Gaussian(8.)  # float32 tiles are indefinite at this ridge
    s, _ = quiet(lambda: solve_iterative(kernel, X, Y, [1e-7], tol=1e-6, rank=200)[0])
    assert s.residual < 1e-3 and s.details["dtype"] in ("float32", "float64")


def test_zero_targets_duplicates_and_one_point():
    X, Y = data(300); z = solve_kernel(Laplace(2.), X, 0 * Y, .1, method="iterative"); assert (z.alpha == 0).all() and z.iterations == 0
    XX, YY = torch.cat([X, X]), torch.cat([Y, Y]); s = solve_kernel(Laplace(2.), XX, YY, .1, method="iterative", tol=1e-8)
    assert rel_err(dense(Laplace(2.)(XX), YY, .1), s.alpha) < 1e-5
    for method in ("auto", "direct", "iterative"): assert torch.allclose(solve_kernel(Laplace(2.), X[:1], Y[:1], 1., method=method).alpha, Y[:1] / 2)


# choice

def test_choice_by_memory_and_work():
    assert choose(4000, 50, 10, 4, 10**10).method == "direct" and choose(40_000, 20, 1, 4, 10**11).method == "iterative" and choose(4000, 50, 10, 8, 10**8).method == "iterative"
    assert "needs" in str(choose(50_000, 20, 1, 8, 4 * 10**9)) and "cheaper" in str(choose(40_000, 20, 1, 4, 10**11))
    with pytest.raises(MemoryError, match="use fewer points"): choose(10**7, 100, 10, 8, 10**9)
    assert iterative_bytes(50_000, 20, 1, default_rank(50_000), 8) < 4e9 < direct_bytes(50_000, 1, 8) and available_memory(torch.device("cpu")) > 10**6


def test_solve_kernel_says_which_and_why():
    X, Y = data(500)
    s = solve_kernel(Laplace(2.), X, Y, .1); assert "n = 500" in s.note and s.method == "cholesky"
    for method in ("direct", "iterative"):
        with pytest.raises(MemoryError, match="raise memory"): solve_kernel(Laplace(2.), X, Y, .1, method=method, memory=1000)
    buf = torch.empty(500, 500, dtype=F64); t = solve_kernel(Laplace(2.), X, Y, .1, out=buf)
    assert torch.equal(s.alpha, t.alpha) and torch.equal(buf.triu(1), Laplace(2.)(X).triu(1))


@pytest.mark.parametrize("method", ["direct", "iterative"])
@pytest.mark.parametrize("X, Y, error, message", [
    (torch.full((4, 2), float("nan")), torch.ones(4), ValueError, "X contains nan"), (torch.ones(4, 2), torch.full((4,), float("inf")), ValueError, "Y contains"),
    (np.array([["a", "b"]], dtype=object), torch.ones(1), TypeError, "numbers only"), (torch.ones(4), torch.ones(4), ValueError, "n × d"), (torch.ones(4, 2), torch.ones(3), ValueError, "rows")])
def test_bad_input(method, X, Y, error, message):
    with pytest.raises(error, match=message): solve_kernel(Laplace(1.), X, Y, 1., method=method)


def test_singular_kernel_without_ridge_through_solve_kernel():
    X, Y = data(60); X, Y = torch.cat([X, X]), torch.cat([Y, Y])
    s, w = quiet(lambda: solve_kernel(Laplace(2.), X, Y, 0.)); assert "minimum norm" in w[0] and s.residual < 1e-8
    i, _ = quiet(lambda: solve_kernel(Laplace(2.), X, Y, 0., method="iterative", tol=1e-8)); assert i.residual <= 1e-8  # a consistent singular system


def test_more_features_than_points():
    X, Y = data(30, 200, 1); kernel = Laplace(median_bandwidth(X)); W = torch.randn(3, 200, generator=torch.Generator().manual_seed(0), dtype=F64)
    for M in (None, LowRank(W), W.T @ W):
        for method in ("direct", "iterative"): assert rel_err(dense(kernel(X, None, M), Y, .1), solve_kernel(kernel, X, Y, .1, M, method=method, tol=1e-9).alpha) < 1e-6
