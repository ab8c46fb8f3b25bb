"Kernels against double loops and autograd (torch only), over seeds, forms of the metric, and bad input."
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fact_nb.linalg import psd_power
from fact_nb.machines import kernels
from fact_nb.machines.kernels import (Exponential, ExpPower, Gaussian, GeneralizedExponential, Kernel, Laplace, LowRank, Polynomial, Quadratic, as_points, blocks,
                             check_kernel, kernel_matmul, median_bandwidth, transform)
from fact_nb.machines.gradients import kernel_fact, fact_core

F64 = torch.float64
REFERENCE = {  # each from its definition, on one pair of points
    "laplace": (Laplace(1.7), lambda x, z, M: torch.exp(-((x - z) @ M @ (x - z)).sqrt() / 1.7)),
    "gaussian": (Gaussian(1.7), lambda x, z, M: torch.exp(-((x - z) @ M @ (x - z)) / (2 * 1.7**2))),
    "power": (ExpPower(1.7, .6), lambda x, z, M: torch.exp(-(((x - z) @ M @ (x - z)).sqrt() / 1.7)**.6)),
    "quadratic": (Quadratic(), lambda x, z, M: (x @ M @ z)**2),
    "polynomial": (Polynomial(3, .5), lambda x, z, M: (x @ M @ z + .5)**3),
    "exponential": (Exponential(6.), lambda x, z, M: torch.exp(x @ M @ z / 6)),
}


def points(seed, n=6, m=5, d=4, k=2):
    g = torch.Generator().manual_seed(seed)
    X, Z, W = (torch.randn(s, generator=g, dtype=F64) for s in ((n, d), (m, d), (k, d)))
    return X, Z, W


def metrics(W):
    d = W.shape[1]; full = W.T @ W + .3 * torch.eye(d, dtype=F64)
    wide = torch.cat([W, W, W]); v = W[0].square() + .1  # k > d too
    return [(None, torch.eye(d, dtype=F64)), (v, torch.diag(v)), (full, full), (LowRank(W), W.T @ W), (LowRank(wide), wide.T @ wide)]


def brute(f, X, Z, M):
    K, G = torch.zeros(len(X), len(Z), dtype=F64), torch.zeros(len(X), len(Z), X.shape[1], dtype=F64)
    for i in range(len(X)):
        for j in range(len(Z)):
            x = X[i].clone().requires_grad_()
            v = f(x, Z[j], M)
            K[i, j], G[i, j] = v.detach(), torch.autograd.grad(v, x)[0]
    return K, G


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient(name, seed):
    kernel, f = REFERENCE[name]
    X, Z, W = points(seed)
    for M, full in metrics(W):
        K, G = brute(f, X, Z, full)
        V, C = kernel.value_and_coef(X, Z, M)
        D = X[:, None] - Z[None] if kernel.radial else Z.expand(len(X), *Z.shape)
        scale = 1 + K.abs().max()
        assert (kernel(X, Z, M) - K).abs().max() < 1e-10 * scale and (V - K).abs().max() < 1e-10 * scale
        assert (C[:, :, None] * (D @ full) - G).abs().max() < 1e-10 * (1 + G.abs().max())


@pytest.mark.parametrize("name", REFERENCE)
def test_symmetric_case_equals_general(name):
    kernel, _ = REFERENCE[name]
    g = torch.Generator().manual_seed(0)
    X = torch.randn(300, 3, generator=g, dtype=F64)  # more than two strips
    K, C = kernel.value_and_coef(X)
    K2, C2 = kernel.value_and_coef(X, X.clone())
    assert torch.equal(K, K.T) and torch.equal(C, C.T)
    off = ~torch.eye(300, dtype=torch.bool)
    assert (K - K2).abs().max() < 1e-6 * K.abs().max()  # r = 0 up to rounding on the general path's diagonal
    assert ((K - K2).abs() / (1 + K.abs()))[off].max() < 1e-10 and ((C - C2).abs() / (1 + C.abs()))[off].max() < 1e-9
    if kernel.radial: assert torch.equal(K.diag(), torch.ones(300, dtype=F64)) and torch.equal(C.diag() * 0, torch.zeros(300, dtype=F64))
    assert torch.allclose(kernel(X), K, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", REFERENCE)
def test_upper_triangle_only_and_out(name):
    kernel, _ = REFERENCE[name]
    X = torch.randn(200, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    out = torch.full((200, 200), 7., dtype=F64)
    K = kernel(X, out=out, mirror=False)
    assert K is out and torch.equal(K.triu(), kernel(X).triu()) and (K[150:, :100] == 7).all()
    buf = torch.empty(200, 200, dtype=F64), torch.empty(200, 200, dtype=F64)
    K, C = kernel.value_and_coef(X, out=buf)
    assert K is buf[0] and C is buf[1] and torch.allclose(K, kernel(X), rtol=1e-14, atol=0)
    with pytest.raises(ValueError, match="out is"): kernel(X, out=torch.empty(3, 3, dtype=F64))


@pytest.mark.parametrize("memory", [1, 4000, 10**9])
def test_blocked_equals_unblocked(memory):
    X, Z, W = points(0, 150, 40)
    V = torch.randn(40, 3, generator=torch.Generator().manual_seed(2), dtype=F64)
    for kernel, _ in REFERENCE.values():
        for M, _ in metrics(W):
            K, seen = kernel(X, Z, M), 0
            for rows, B in blocks(X, Z, M, kernel, memory=memory):
                assert rows.start == seen; seen = rows.stop
                assert ((B - K[rows]).abs() <= 1e-12 * (1 + K[rows].abs())).all()
                assert B.numel() * 8 <= max(memory, 8 * 40)
            assert seen == 150
            assert torch.allclose(kernel_matmul(kernel, X, Z, M, V, memory), K @ V, rtol=1e-11, atol=1e-11)


def test_numpy_and_integer_input():
    X = np.arange(12).reshape(4, 3)
    assert Laplace(2.)(X).dtype == torch.get_default_dtype()
    assert Laplace(2.)(X.astype(np.float64)).dtype == F64


def test_shift_does_not_cost_digits():
    X = torch.randn(100, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
    assert (Laplace(2.)(X + 1e6) - Laplace(2.)(X)).abs().max() < 1e-6
    far = (X + 3000).float()
    exact = Laplace(2.)(far.double())
    assert (Laplace(2.)(far) - exact).abs().max() < 2e-3
    naive = torch.exp(-(far.square().sum(1)[:, None] + far.square().sum(1) - 2 * far @ far.T).clamp(min=0).sqrt() / 2)
    assert (naive - exact).abs().max() > 50 * (Laplace(2.)(far) - exact).abs().max()


def test_duplicates_and_constant_columns():
    X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    X[:, 1] = 5.
    XX = torch.cat([X, X])
    for dtype in (torch.float32, F64):
        K, C = Laplace(1.).value_and_coef(XX.to(dtype))
        assert torch.isfinite(C).all() and (K[:40, 40:].diag() - 1).abs().max() < 1e-3 and torch.linalg.eigvalsh(K.double()).min() > -1e-3


@pytest.mark.parametrize("name", ["laplace", "gaussian", "power"])
def test_one_point(name):
    kernel, _ = REFERENCE[name]
    K, C = kernel.value_and_coef(torch.ones(1, 3))
    assert K.item() == 1 and torch.isfinite(C).all()


def test_autograd_through_kernel():
    X, Z, W = points(3)
    X.requires_grad_(); M = (W.T @ W + torch.eye(4, dtype=F64)).requires_grad_()
    for kernel, f in REFERENCE.values():
        g = torch.autograd.grad(kernel(X, Z, M).sum(), (X, M))
        loop = sum(f(X[i], Z[j], M) for i in range(len(X)) for j in range(len(Z)))
        want = torch.autograd.grad(loop, (X, M))
        assert torch.allclose(g[0], want[0], atol=1e-9)
        sym = lambda A: (A + A.T) / 2
        assert torch.allclose(sym(g[1]), sym(want[1]), atol=1e-9)
        assert all(torch.isfinite(t).all() for t in torch.autograd.grad(kernel(X, None, M).sum(), (X, M)))  # no infinity on the diagonal


@pytest.mark.parametrize("X, error, message", [
    (torch.tensor([[1., float("nan")]]), ValueError, "nan or inf"), (torch.tensor([[1., float("inf")]]), ValueError, "nan or inf"),
    (torch.ones(3), ValueError, "n × d"), (torch.ones(2, 2, 2), ValueError, "n × d"), (torch.ones(0, 2), ValueError, "empty"),
    (np.array([["a", 1]], dtype=object), TypeError, "numbers only"), ([[None]], TypeError, "numbers only"), (torch.ones(2, 2, dtype=torch.cfloat), TypeError, "complex")])
def test_bad_points(X, error, message):
    with pytest.raises(error, match=message): Laplace(1.)(X)


def test_inf_that_cancels_is_found():
    with pytest.raises(ValueError, match="nan or inf"): as_points(torch.tensor([[float("inf"), -float("inf")]]))
    assert as_points(torch.full((2, 2), 3e38)).shape == (2, 2)  # the sum overflows, the entries do not


@pytest.mark.parametrize("M, message", [(torch.ones(3), "features"), (torch.eye(3), "features"), (LowRank(torch.ones(2, 3)), "features"), (torch.full((4,), float("nan")), "nan or inf"),
                                        (torch.tril(torch.ones(4, 4)), "not symmetric"), (torch.ones(1, 4, 4), "features")])
def test_bad_metric(M, message):
    with pytest.raises(ValueError, match=message): Laplace(1.)(torch.ones(5, 4), None, M)


@pytest.mark.parametrize("make, message", [(lambda: Laplace(0.), "positive"), (lambda: Gaussian(-1.), "positive"), (lambda: Laplace(float("nan")), "positive"), (lambda: ExpPower(1., 3.), "definite"),
                                           (lambda: Polynomial(0), "whole number"), (lambda: Polynomial(2, -1.), "offset"), (lambda: Exponential(0.), "positive"),
                                           (lambda: Quadratic().with_bandwidth(2.), "no bandwidth"), (lambda: Laplace()(torch.ones(2, 2)), "not set"),
                                           (lambda: Laplace(1.)(torch.ones(2, 2), torch.ones(2, 3)), "2 features, Z has 3")])
def test_bad_kernel(make, message):
    with pytest.raises(ValueError, match=message): make()


def test_bandwidths():
    assert Laplace().with_bandwidth(3.).bandwidth == 3. and Exponential(2.).with_bandwidth(5.).scale == 5. and Exponential(2.).bandwidth == 2.
    assert GeneralizedExponential is ExpPower and ExpPower(2., .5).with_bandwidth(4.) == ExpPower(4., .5)
    X = torch.randn(500, 10, generator=torch.Generator().manual_seed(0), dtype=F64)
    D = torch.stack([torch.stack([(x - z).norm() for z in X[:60]]) for x in X[:60]])
    want = D[tuple(torch.triu_indices(60, 60, 1))].median()
    assert abs(median_bandwidth(X[:60]) - want) < 1e-9
    assert median_bandwidth(X, kernel=Laplace()) == median_bandwidth(X)
    W = X[:3]; assert abs(median_bandwidth(X, LowRank(W)) / median_bandwidth(X @ W.T) - 1) < 1e-9


def test_custom_kernel_needs_two_functions():
    @dataclass(frozen=True)
    class Cauchy(Kernel):
        bandwidth: float = 1.
        def k(self, t): return 1 / (1 + t / self.bandwidth**2)
        def dk(self, t): return -1 / self.bandwidth**2 / (1 + t / self.bandwidth**2)**2

    X, Z, W = points(5)
    check_kernel(Cauchy(2.))
    K, G = brute(lambda x, z, M: 1 / (1 + (x - z) @ M @ (x - z) / 4), X, Z, W.T @ W)
    V, C = Cauchy(2.).value_and_coef(X, Z, LowRank(W))
    assert (V - K).abs().max() < 1e-12 and (C[:, :, None] * transform((X[:, None] - Z[None]).reshape(-1, 4), LowRank(W)).view(6, 5, 4) - G).abs().max() < 1e-12
    assert Cauchy(2.)(X).diag().eq(1).all() and Cauchy().with_bandwidth(3.).bandwidth == 3.

    class Half(Kernel):
        def k(self, t): return t
    with pytest.raises(NotImplementedError, match="dk"): Half().value_and_coef(X)

    class InPlace(Cauchy):  # an in-place version that disagrees is caught
        def k_(self, t): return t.mul_(2)
    with pytest.raises(ValueError, match="disagree"): check_kernel(InPlace(1.))


@pytest.mark.parametrize("kernel", [Laplace(1.), Gaussian(1.), Quadratic(), Exponential(1.)])
@pytest.mark.parametrize("M", [torch.tensor([1., 1., -.1]), torch.diag(torch.tensor([1., 1., -.1])), torch.tensor([[0., 1., 0.], [1., 0., 0.], [0., 0., 1.]])])
def test_a_metric_with_negative_eigenvalues_is_refused(kernel, M):
    X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    says = "has negative eigenvalues.*psd_power.M, 1., negative='clip'. of fact_nb.linalg"
    for call in (lambda: kernel(X, None, M), lambda: kernel.value_and_coef(X, None, M), lambda: kernel_matmul(kernel, X, None, M, torch.ones(5))):
        with pytest.raises(ValueError, match=says): call()
    good = M.clamp(min=0) if M.ndim == 1 else psd_power(M, 1., negative="clip")
    assert torch.isfinite(kernel(X, None, good)).all()


def test_rounding_does_not_make_a_metric_indefinite():
    g = torch.Generator().manual_seed(0)
    X, W = torch.randn(6, 40, generator=g), torch.randn(2, 40, generator=g)
    for M in (W.T @ W, torch.zeros(40, 40), torch.ones(40) * 1e-30): assert torch.isfinite(Laplace(1.)(X, None, M)).all()
    with pytest.raises(ValueError, match="eigenvalues"): kernel_fact(Laplace(1.), X, torch.ones(6, 1), -torch.eye(40))


def far_and_twice(seed=0, n=600, d=12):
    "Most rows close together, twenty far away, each of these twice, with opposite targets and so with a large α."
    g = torch.Generator().manual_seed(seed)
    X, a, W = (torch.randn(*s, generator=g, dtype=F64) for s in ((n, d), (n, 2), (d, d)))
    X[:20] *= 1000
    a[:20] *= 1000                                          # 1/ρ at ρ = 1e-3
    X[20:40], a[20:40] = X[:20], -a[:20]
    return X, a, W @ W.T / d


def exact_fact(X, a, M, L):
    "FACT of the Laplace kernel from differences of rows: equal rows differ by exactly 0."
    D = X[:, None] - X[None]
    r = torch.einsum("ijd,de,ije->ij", D, M, D).clamp(min=0).sqrt()
    C = torch.where((D == 0).all(-1), 0., -torch.exp(-r / L) / (L * r))
    return M @ torch.einsum("ij,ijd,ije->de", C * (a @ a.T), D, D) / 2


def stored_fact(X, a, M, L):
    "FACT as a machine has it: from the coefficients that it stored with the kernel matrix."
    X = X - X.mean(0)
    return M @ fact_core(Laplace(L).value_and_coef(X, None, M)[1], a, X, True)


@pytest.mark.parametrize("seed", range(3))
def test_rows_far_from_the_others_are_equal_when_they_are(seed):
    X, a, M = far_and_twice(seed)
    want = exact_fact(X, a, M, 2.)
    for found in (kernel_fact(Laplace(2.), X, a, M), stored_fact(X, a, M, 2.)): assert (found - want).norm() < 1e-9 * want.norm()
    for dtype in (F64, torch.float32):
        K, C = Laplace(2.).value_and_coef(X.to(dtype), None, M.to(dtype))
        assert (K[:20, 20:40].diagonal() == 1).all() and (C[:20, 20:40].diagonal() == 0).all()


@pytest.mark.parametrize("times", [1, 4])
def test_one_line_for_all_pairs_at_the_median_norm_is_wrong_there(times, monkeypatch):
    "It takes the rounding errors of long rows for distances; so it was once, in two variants."
    X, a, M = far_and_twice()
    made = kernels._with_norms
    def at_median(A, B, s, u, same):
        return replace(made(A, B, s, u, same), floor=times * 8 * torch.finfo(A.dtype).eps * float(s.median() + u.median()))
    monkeypatch.setattr(kernels, "shrink_norms", lambda norms: norms)
    monkeypatch.setattr(kernels, "_with_norms", at_median)
    want = exact_fact(X, a, M, 2.)
    assert (stored_fact(X, a, M, 2.) - want).norm() > .01 * want.norm()


def test_a_registered_kernel_is_found_by_name_and_a_name_is_taken_once():
    @kernels.register_kernel(name="test_twice")
    @dataclass(frozen=True)
    class Twice(Kernel):
        bandwidth: float | None = None
        def k(self, t): return torch.exp(-2 * t / self.bandwidth**2)
        def dk(self, t): return -2 * self.k(t) / self.bandwidth**2
    try:
        assert kernels.kernel_named("test_twice") == Twice() and kernels.kernel_of(kernels.kernel_spec(Twice(3.))) == Twice(3.)
        with pytest.raises(ValueError, match="taken by"): kernels.register_kernel(Gaussian, name="test_twice")
    finally: del kernels.NAMES["test_twice"]
    with pytest.raises(ValueError, match="import the module that registers it"): kernels.kernel_of(dict(name="test_twice", fields={}))
