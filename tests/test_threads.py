"""Strips on every core: the same numbers with any number of threads, and no harm to the caller."""
import pytest
import torch

from fact_nb import RFM, RFMClassifier
from fact_nb.machines.direct import cholesky_
from fact_nb.machines.gradients import fact_core
from fact_nb.machines.kernels import Gaussian, Laplace, Quadratic, median_bandwidth, strip_rows
from fact_nb.machines.threads import cores, one_core_each, spread


@pytest.fixture
def threads():
    "Sets the number of threads; as before afterwards."
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def points(n=1200, d=6, dtype=torch.float64):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("kernel", [Laplace(2.), Gaussian(2.), Quadratic()], ids=str)
def test_two_threads_give_the_same_matrices_to_the_bit(kernel, threads):
    X, alpha, made = points(), points(d=3), {}
    for k in (1, 2):
        threads(k)
        K, C = kernel.value_and_coef(X)
        made[k] = K, C.clone(), fact_core(C, alpha, X, kernel.radial)
    assert all(torch.equal(a, b) for a, b in zip(made[1], made[2]))


@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("n", [600, 1700])
def test_lapack_and_panels_factor_alike(n, dtype, tol, threads):
    K = Laplace(2.)(points(n, dtype=dtype))
    exact = torch.linalg.cholesky(K.double() + .1 * torch.eye(n).double())
    for k in (1, 2):
        threads(k)
        A = K.clone()
        assert cholesky_(A, K.diagonal().clone(), .1) == 0
        assert (A.tril() - exact).abs().max() < tol
        assert torch.equal(A.triu(1), K.triu(1))


@pytest.mark.parametrize("k", [1, 2])
def test_the_column_that_fails_is_named_by_all(k, threads):
    threads(k)
    K = Laplace(2.)(points(1700))
    K[1000, 1000] = -1.
    assert cholesky_(K, K.diagonal().clone()) == 1001


def test_a_fit_with_two_threads_is_the_fit_with_one(threads):
    X = points(1600)
    y, made = X[:, 0].sin() * X[:, 1], {}
    for k in (1, 2):
        threads(k)
        m = RFM(Laplace(3.), iters=2, ridge=.1, progress=False).fit(X, y)
        made[k] = m.M, m.predict(X[:50])
        assert torch.get_num_threads() == k
    assert all((a - b).norm() < 1e-9 * b.norm() for a, b in zip(made[1], made[2]))


def test_inside_a_call_has_one_core_and_errors_leave_no_trace(threads):
    threads(3)
    with pytest.raises(ZeroDivisionError), one_core_each():
        assert (torch.get_num_threads(), cores()) == (1, 3)
        1 / 0
    assert (torch.get_num_threads(), cores()) == (3, 3)
    with pytest.raises(ZeroDivisionError):
        list(spread(lambda i: 1 / i, [1, 1, 0, 1]))


class Counted(Laplace):
    "A kernel that writes down how many threads torch had."
    seen = []

    def k_(self, t):
        self.seen.append(torch.get_num_threads())
        return super().k_(t)


@pytest.mark.parametrize("update", ("fact", "evidence"))
def test_an_estimator_makes_every_matrix_on_one_core(update, threads):
    "The ridge at M = I, the fits, and the scores of rows that are left out."
    threads(2)
    X = points(150)
    Counted.seen.clear()
    RFMClassifier(kernel=Counted(), update=update).fit(X, (X[:, 0] > 0).long())
    assert len(Counted.seen) >= 2 and set(Counted.seen) == {1}
    assert torch.get_num_threads() == 2


def test_strips_on_a_device_are_a_part_of_the_matrix():
    there = torch.device("meta")
    assert strip_rows(1000, there) == 128 and strip_rows(8000, there) == 1000
    assert strip_rows(100_000, there) * 100_000 <= 2**24


def plain_weighted_median(values, counts):
    values, order = values.sort()
    total = counts[order].cumsum(0)
    return float(values[torch.searchsorted(total, total[-1:] / 2)])


@pytest.mark.parametrize("seed", range(5))
def test_weighted_median_equals_sorting(seed):
    g = torch.Generator().manual_seed(seed)
    X = torch.randint(0, 5, (60, 2), generator=g).double()      # many equal distances
    w = torch.randint(0, 4, (60,), generator=g).double()
    i, j = torch.triu_indices(60, 60, 1)
    d = (X[i] - X[j]).norm(dim=1)
    some = (d > 0) & (w[i] * w[j] > 0)
    want = plain_weighted_median(d[some], (w[i] * w[j])[some])
    assert abs(median_bandwidth(X, weight=w) - want) < 1e-12
    assert median_bandwidth(X[:1]) == median_bandwidth(X[:2], weight=w[:2] * 0) == 1.
