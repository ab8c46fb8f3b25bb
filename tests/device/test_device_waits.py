"What makes a device wait for the host, by line; what it holds in bytes."
import pytest
import torch
from torch.nn import functional as F

from fact_nb.machines.kernels import Gaussian, kernel_matmul
from fact_nb.machines.rfm import RFM
from fact_nb.machines.solvers import solve_kernel
from fact_nb.networks import models
from fact_nb.networks.measure import measure
from fact_nb.networks.training import Batches, Recipe, train
from fact_nb.runtime import seeded

pytestmark = [pytest.mark.simulated, pytest.mark.filterwarnings("ignore")]


def data(n, d=6, c=2, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    X = torch.randn(n, d, generator=rng, dtype=dtype)
    return X, X[:, :c] * X[:, 1:c + 1]


def waits(f, *args):
    import simulated
    simulated.WAITS.clear()
    f(*args)
    return sum(simulated.WAITS.values()), dict(simulated.WAITS)


def test_a_step_of_training_does_not_wait(device):
    x, y = data(320)
    def epoch(n):
        with seeded(0):
            model = models.mlp(6, 2, 8, 2).to(device)
        train(model, F.mse_loss, x[:n], y[:n], Recipe(epochs=1, batch_size=16), progress=False)
    (short, _), (long, by_line) = waits(epoch, 160), waits(epoch, 320)
    assert short == long, by_line


def test_distances_are_not_rounded_by_tf32(device):
    "A user's switch for fast training does not reach the products that distances are made of."
    import simulated
    x, y = (t.to(device) for t in data(60))
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        k = Gaussian(3.)
        for f in (lambda: k(x), lambda: k.value_and_coef(x), lambda: kernel_matmul(k, x, None, None, y),
                  lambda: solve_kernel(k, x, y, .1), lambda: k(x.clone().requires_grad_())):
            simulated.ROUNDED.clear()
            f()
            assert not [line for line in simulated.ROUNDED if line.startswith(
                ("kernels", "direct", "iterative"))], simulated.ROUNDED
        simulated.ROUNDED.clear()
        x @ x.T
        assert simulated.ROUNDED           # the count sees what it must
    finally:
        torch.set_float32_matmul_precision(was)


def test_a_look_at_a_network_waits_by_the_batch_and_not_by_the_row(device):
    "At most ten times a batch, whatever its rows: the sums stay on the device."
    x, y = (t.to(device) for t in data(256))
    with seeded(0):
        model = models.mlp(6, 2, 8, 2).to(device)
    look = lambda rows, size: measure(model, F.mse_loss, Batches(x[:rows], y[:rows], size), 1e-2)
    (one, _), (four, by_line) = waits(look, 128, 128), waits(look, 128, 32)
    assert four - one <= 3 * 10 and one <= 25, by_line
    assert waits(look, 256, 64)[0] == four


@pytest.mark.parametrize("method, most", [("cholesky", 8), ("eigh", 9)])
def test_a_direct_solver_waits_by_the_panel_and_not_by_the_row(method, most, device):
    "Twice as many rows and columns of y in the same number of panels: as many waits."
    k = Gaussian(3.)
    def solved(n):
        x, y = (t.to(device) for t in data(n, dtype=torch.float64))
        return waits(lambda: solve_kernel(k, x, y, .1, method=method))
    (small, _), (large, by_line) = solved(60), solved(120)
    assert small == large <= most, by_line


def test_an_iterative_solver_waits_a_few_times_a_step(device):
    x, y = (t.to(device) for t in data(200, dtype=torch.float64))
    found = []
    count, by_line = waits(lambda: found.append(
        solve_kernel(Gaussian(3.), x, y, .1, method="iterative", tol=1e-6, rank=50)))
    assert count <= 60 + 4 * found[0].iterations, by_line


@pytest.mark.parametrize("update, most", [("fact", 25), ("nfa", 25)])
def test_an_update_waits_a_fixed_number_of_times(update, most, device):
    "Whatever n and the number of outputs; each iteration as many times as the last."
    def fit(n, iters):
        x, y = (t.to(device) for t in data(n, dtype=torch.float64))
        return waits(lambda: RFM(Gaussian(3.), update, iters=iters, ridge=.1, progress=False).fit(x, y))
    (one, _), (two, by_line) = fit(60, 1), fit(60, 2)
    assert 0 < two - one <= most, by_line
    assert fit(120, 2)[0] == two
