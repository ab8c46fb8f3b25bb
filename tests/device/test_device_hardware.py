"""What only a real device shows: its own counts of memory, its switches, its queue.

Skipped on the simulated one. `python -m pytest tests/device --device cuda` runs them with the rest.
"""
import warnings
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fact_nb.machines import kernels
from fact_nb.machines.rfm import RFM
from fact_nb.machines.solvers import available_memory, direct_bytes, solve_kernel
from fact_nb.networks import models
from fact_nb.networks.training import Recipe, train
from fact_nb.runtime import has_float64, seeded, weak_in_double

pytestmark = [pytest.mark.hardware, pytest.mark.filterwarnings("ignore")]
N = 6000


@pytest.fixture
def cuda(device):
    if device.type != "cuda": pytest.skip("torch counts this on cuda only")
    torch.cuda.empty_cache()
    yield device
    torch.cuda.empty_cache()


def points(device, n=N, d=10, dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    X = torch.randn(n, d, generator=rng, dtype=torch.float64).to(device, dtype)
    return X, X[:, :1] * X[:, 1:2]


def peak(f, device, n=N, size=8):
    "The most that was allocated at once beyond what was there, in n × n matrices."
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    f()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / (n * n * size)


@pytest.mark.parametrize("stored, most", [(True, 2.2), (False, 1.2)])
def test_the_allocator_counts_what_was_promised(stored, most, cuda):
    "K, and C where it is stored; the largest strip is a tenth of a matrix at this n."
    X, y = points(cuda)
    need = direct_bytes(N, 1, 8)
    memory = need + (1.5 if stored else .4) * 8 * N * N
    fit = lambda: RFM(kernels.Laplace(3.), iters=2, ridge=1., solver="cholesky", memory=memory,
                      refine=False, progress=False).fit(X, y)
    fit()                                       # cuBLAS and cuSOLVER take their workspaces
    assert peak(fit, cuda) <= most


def test_the_cache_counts_as_free(cuda):
    before = available_memory(cuda)
    A = torch.empty(int(.3 * before), dtype=torch.uint8, device=cuda)
    assert available_memory(cuda) < .8 * before
    del A
    assert available_memory(cuda) == pytest.approx(before, rel=.05)


@pytest.mark.parametrize("k", [kernels.Laplace(3.), kernels.Gaussian(3.)], ids=lambda k: type(k).__name__)
def test_distances_are_not_rounded_by_tf32(k, cuda):
    "The switch is on, the card could round, and the kernel is that of float64 to seven digits."
    X, _ = points(cuda, 500, 40, torch.float32)
    X = X + 30                                  # where ten bits of mantissa would show
    exact = k(X.double().cpu())
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        error = (k(X).cpu().double() - exact).abs().max()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(was)
    assert error < 1e-3


def synchronisations(f):
    "How often the host waited for the card, by torch's own count."
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            f()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(w.message) for w in seen)


def test_a_step_of_training_does_not_wait(cuda):
    "Ten steps or twenty, the host waits as often."
    X, _ = points(cuda, 320, 6, torch.float32)
    def epoch(n):
        with seeded(0):
            model = models.mlp(6, 2, 8, 2).to(cuda)
        train(model, F.mse_loss, X[:n], X[:n, :2], Recipe(epochs=1, batch_size=16), progress=False)
    epoch(320)                                  # what is loaded at first use
    assert synchronisations(lambda: X.sum().item()) == 1            # the count sees what it must
    assert synchronisations(lambda: epoch(160)) == synchronisations(lambda: epoch(320))


def test_events_see_that_a_kernel_product_is_queued(cuda):
    "When the call is back, the card is still at work: nothing inside waited for it."
    X, y = points(cuda, 40_000)
    P = kernels.pairs(X, None, None, True)
    work = lambda: kernels.evaluate_pairs(kernels.Laplace(3.), replace(P, left=P.left[:4000])) @ y
    work()
    done = torch.cuda.Event()
    torch.cuda.synchronize(cuda)
    for _ in range(5): work()
    done.record()
    assert not done.query()
    done.synchronize()


def test_the_rate_in_double_is_what_the_name_of_the_card_says(cuda):
    from fact_nb.lab.needs import measure_rates
    rates = measure_rates(cuda)
    assert weak_in_double(cuda) == (rates.flops64 < rates.flops / 8)


def test_a_solver_gives_the_same_twice(device):
    dtype = torch.float64 if has_float64(device) else torch.float32
    X, y = points(device, 800, dtype=dtype)
    first, again = (solve_kernel(kernels.Laplace(3.), X, y, .1).alpha for _ in range(2))
    torch.testing.assert_close(first, again, rtol=1e-12 if dtype == torch.float64 else 1e-4, atol=0)
