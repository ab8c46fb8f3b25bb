"""Bytes on the simulated device, counted at small n, and what they come to at the paper's sizes.

A strip's share of a matrix falls with n: at 25,000 rows a strip is 2.7 % of them, at 50,000 .7 %.
The counts here are made with the share that strips have at 25,000 rows.
"""
import pytest
import torch

from fact_nb.data.uci import Table
from fact_nb.lab.experiment import registry
from fact_nb.machines import batched, gradients, kernels
from fact_nb.machines.batched import Rules, Search, factor_, fit_one, published
from fact_nb.machines.direct import cholesky_
from fact_nb.machines.packed import packed_room, solve_packed
from fact_nb.machines.rfm import RFM

pytestmark = [pytest.mark.simulated, pytest.mark.filterwarnings("ignore")]
N = 1024
KERNELS = [kernels.Laplace(3.), kernels.Gaussian(3.), kernels.Quadratic()]
name_of = lambda k: type(k).__name__


@pytest.fixture(autouse=True)
def strips_of_a_large_matrix(monkeypatch):
    for module in (kernels, gradients, batched):
        monkeypatch.setattr(module, "strip_rows", lambda m, where: max(1, int(.027 * m)))


def matrices(f, n=N, size=8):
    "The most that `f` holds at once beyond what was there, in n × n matrices."
    import simulated
    before = simulated.MEMORY.now
    simulated.MEMORY.reset()
    kept = f()
    peak = simulated.MEMORY.peak - before
    del kept
    return peak / (n * n * size)


def points(device, n=N, d=10):
    rng = torch.Generator().manual_seed(0)
    X = torch.randn(n, d, generator=rng, dtype=torch.float64).to(device)
    return X, X[:, :1] * X[:, 1:2]


def test_strips_have_this_share_at_25_000_rows(monkeypatch):
    monkeypatch.undo()
    rows = kernels.strip_rows(25_000, torch.device("cuda"))
    assert rows / 25_000 <= .027 and kernels.strip_rows(50_000, torch.device("cuda")) <= 340


@pytest.mark.parametrize("k", KERNELS, ids=name_of)
def test_a_kernel_matrix_is_one_matrix_and_coefficients_a_second(k, device):
    X, _ = points(device)
    assert matrices(lambda: k(X)) <= 1.15
    assert matrices(lambda: k.value_and_coef(X)) <= 2.15


def test_the_factor_is_made_in_place(device):
    X, _ = points(device)
    K = kernels.Laplace(3.)(X)
    K.diagonal().add_(1.)
    assert matrices(lambda: cholesky_(K, K.diagonal().clone())) <= .2
    assert matrices(lambda: factor_(K, True)) <= .2


@pytest.mark.parametrize("k", KERNELS, ids=name_of)
def test_the_packed_solver_holds_half_a_matrix(k, device):
    "Strips of a fortieth of the rows, as 512 of 20,000 are."
    X, y = points(device)
    room = lambda: packed_room(X, block=N // 40)
    assert matrices(lambda: solve_packed(k, X, y, 1., out=room())) <= .65


@pytest.mark.parametrize("k", KERNELS, ids=name_of)
def test_rfm_with_and_without_stored_coefficients(k, device):
    X, y = points(device)
    def fit(memory):
        return RFM(k, iters=2, ridge=1., solver="cholesky", memory=memory * 8 * N * N,
                   progress=False).fit(X, y)
    assert matrices(lambda: fit(3.2)) <= 2.2
    assert matrices(lambda: fit(1.9)) <= 1.2


def table(device, n=2400):
    rng = torch.Generator().manual_seed(0)
    X = torch.randn(n, 6, generator=rng, dtype=torch.float64)
    y = (X[:, 0] * X[:, 1] > 0).long()
    rows = torch.arange(n, device=device)
    fold = rows[:3 * n // 4], rows[3 * n // 4:]
    made = Table("made up", X.to(device), y.to(device), 2, rows[:n // 2], rows[n // 2:], (fold,))
    return made, n


def test_a_fold_of_a_table(device):
    "The search on half of the rows holds K and C, the score on three quarters K alone."
    T, n = table(device)
    rules = Rules(("kernel", "fact"), (1.,), 1, 10.)
    fold = 3 * n // 4
    assert matrices(lambda: published(rules, T), fold) <= 1.25
    s = Search(rules, T.X[:N], torch.nn.functional.one_hot(T.y[:N]).double(), T.X[N:], T.y[N:])
    assert matrices(lambda: fit_one(s, None, (1.,))) <= 2.2


def peak(name):
    exp = registry()[name]
    cfg = exp.preset("paper")
    return max(exp.work(cfg, u).bytes for u in exp.units(cfg))


def test_the_counts_are_those_that_the_presets_are_estimated_with():
    "2.2 and 1.2 matrices; the largest table and the largest parity fit a card of 48 GB."
    assert peak("parity") == pytest.approx(1.2 * 8 * 50_000**2, rel=.01)
    assert peak("tabular") == pytest.approx(1.2 * 8 * (3 * 67_557 // 4)**2, rel=.01)
    assert max(peak("parity"), peak("tabular")) < 48e9


def test_out_of_memory_falls_back_to_the_next_plan(device):
    "First without stored coefficients, then iteratively; the answers are the same."
    import simulated
    X, y = points(device, 600)
    def fit(room, **options):
        simulated.MEMORY.reset(total=simulated.MEMORY.now + int(room * 8 * 600**2))
        try:
            return RFM(kernels.Laplace(3.), iters=1, ridge=1., progress=False, memory=1e9,
                       **options).fit(X, y)
        finally:
            simulated.MEMORY.reset()
    whole = fit(9., solver="cholesky")
    with pytest.warns(RuntimeWarning, match="without stored coefficients"):
        lean = fit(1.7, solver="cholesky")
    torch.testing.assert_close(lean.alpha.cpu(), whole.alpha.cpu(), rtol=1e-6, atol=1e-8)
    with pytest.raises(torch.OutOfMemoryError): fit(.5, solver="cholesky")
