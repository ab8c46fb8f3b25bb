"What makes a device wait for the host, by line; what it holds in bytes."
import pytest
import torch
from torch.nn import functional as F

from fact_nb.networks import models
from fact_nb.networks.training import Recipe, train
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
    from fact_nb.machines.kernels import Gaussian, kernel_matmul
    from fact_nb.machines.rfm import RFM
    from fact_nb.machines.solvers import solve_kernel
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
