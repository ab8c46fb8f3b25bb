"The public surface on a device: the same numbers as on the host, and everything stays there."
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fact_nb.linalg import eigh, pearson, psd_power, rel_err, sym_sqrt
from fact_nb.machines import kernels
from fact_nb.machines.estimators import RFMClassifier, RFMRegressor
from fact_nb.machines.rfm import RFM
from fact_nb.machines.solvers import solve_kernel_grid
from fact_nb.networks import models
from fact_nb.networks.critical_points import train_to_critical
from fact_nb.networks.measure import measure
from fact_nb.networks.moving_average import Motion
from fact_nb.networks.training import Batches, Recipe, cross_entropy, residuals, train
from fact_nb.networks.watch import Watch
from fact_nb.experiments.depth import Window
from fact_nb.networks.zero_decay import MeanStep, dual_fact, min_norm_point
from fact_nb.runtime import device as find_device, set_random_state
from fact_nb.runtime import has_float64, seeded

pytestmark = pytest.mark.filterwarnings("ignore")


def data(n=40, d=6, c=2, dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    X = torch.randn(n, d, generator=rng, dtype=dtype)
    return X, X[:, :c] * X[:, 1:c + 1] + .1 * torch.randn(n, c, generator=rng, dtype=dtype)


def network(make, where):
    with seeded(0):
        return make().to(where)


def close(a, b, tol=1e-4):
    torch.testing.assert_close(a.cpu().to(b.dtype), b.cpu(), rtol=tol, atol=tol)


def same_table(a, b, tol=1e-3):
    np.testing.assert_allclose(b.select_dtypes("number"), a.select_dtypes("number"),
                               rtol=tol, atol=tol)


class Tied(nn.Module):
    "An embedding whose matrix is the last layer too."
    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(7, 4, padding_idx=0)
        self.last = nn.Linear(4, 7, bias=False)
        self.last.weight = self.inner.weight

    def forward(self, tokens): return self.last(self.inner(tokens))


class Recurrent(nn.Module):
    "An LSTM, read at its last position."
    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x): return self.last(self.lstm(x[:, None].expand(-1, 3, -1))[0][:, -1])


def images():
    rng = torch.Generator().manual_seed(1)
    return torch.randn(9, 3, 8, 8, generator=rng), torch.randn(9, 2, generator=rng)


tokens = torch.randint(0, 7, (6, 5), generator=torch.Generator().manual_seed(0))
NETS = dict(
    mlp=(lambda: models.mlp(6, 2, 8, 2), data(dtype=torch.float32), F.mse_loss),
    normed=(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(.5),
                                  nn.Linear(8, 2)), data(dtype=torch.float32), F.mse_loss),
    cnn=(lambda: models.cnn(2, (3, 4), 8), images(), F.mse_loss),
    transformer=(lambda: models.CharTransformer(7, 4, 2, 1, 5), (tokens, tokens), cross_entropy),
    tied=(Tied, (tokens, tokens), cross_entropy))


@pytest.mark.parametrize("name", NETS)
def test_measure(name, device):
    "Every quantity of each kind of layer, in two batches."
    make, (x, y), loss = NETS[name]
    exact = name in ("mlp", "normed", "cnn")
    agop = dict(agop="exact" if exact else "sketch", probes=2)
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    host, there = (measure(network(make, w).eval(), loss, batches, 1e-2, **agop)
                   for w in ("cpu", device))
    assert all(e.W.device == device and e.bfact.device == device for e in there.entries.values())
    a, b = host.table(), there.table()
    shared = [c for c in a.columns if exact or "AGOP" not in c]      # sketches draw other probes
    same_table(a[shared], b[shared])


@pytest.mark.parametrize("name", NETS)
def test_alignments(name, device):
    "The inputs of each kind of layer, and the change since the start."
    make, (x, y), loss = NETS[name]
    asked = ["enfa", "benfa", "hcov", "bhcov", "cnfm"]
    found = []
    for where in ("cpu", device):
        model = network(make, where).eval()
        before = {k: 2 * v for k, v in model.state_dict().items()}
        found.append(measure(model, loss, [(x[:4], y[:4]), (x[4:], y[4:])], 1e-2,
                             quantities=asked, start=before))
    host, there = found
    assert all(u.hcov.device == device for e in there.entries.values() for u in e.uses.values()
               if u.has("hcov"))
    same_table(host.alignments(), there.alignments())


def test_measure_without_float64(narrow):
    make, (x, y), loss = NETS["mlp"]
    host, there = (measure(network(make, w), loss, [(x, y)], 1e-2) for w in ("cpu", narrow))
    same_table(host.table(), there.table(), 1e-2)


CALLBACKS = dict(
    watch=lambda m, x, y: Watch(F.mse_loss, [(x, y)], 1e-3),
    motion=lambda m, x, y: Motion(m, exact=True),
    midpoint=lambda m, x, y: Motion(m, every=3, midpoint=True, columns=4),
    mean_step=lambda m, x, y: MeanStep(m, gradient=True))


class Stop:
    "Ends the process, as a kill would, at an epoch."
    def __init__(self, at): self.at = at

    def __call__(self, model, epoch):
        if epoch == self.at: raise KeyboardInterrupt


def trained(name, where, at=None, path=None, dropout=False, polish=0):
    "A training run with one callback; killed at an epoch if that is wanted."
    x, y = data(dtype=torch.float32)
    make = NETS["normed"][0] if dropout else lambda: models.mlp(6, 2, 8, 2)
    model = network(make, where)
    seen = CALLBACKS[name](model, x, y)
    recipe = Recipe(epochs=3, batch_size=16, lr=.01, weight_decay=1e-3, polish_steps=polish,
                    polish_unit=2, optimizer="adamw" if name == "mean_step" else "sgd")
    train(model, F.mse_loss, x, y, recipe, callbacks=[seen, Stop(at)], checkpoint=path,
          save_every=0, progress=False)
    return model, seen.history if name == "watch" else seen.table()


@pytest.mark.parametrize("name", CALLBACKS)
def test_training_killed_and_resumed(name, device, tmp_path):
    whole, table = trained(name, device)
    with pytest.raises(KeyboardInterrupt):
        trained(name, device, 2, tmp_path / "c")
    again, table2 = trained(name, device, None, tmp_path / "c")
    for p, q in zip(whole.parameters(), again.parameters()):
        assert q.device == device
        close(p, q, 1e-6)
    same_table(table, table2)


def test_the_window_of_depth_killed_and_resumed(device, tmp_path):
    "Its sums come back from the host and go on where the gradients are."
    def run(at=None, path=None):
        x, y = data(dtype=torch.float32)
        model, win = network(lambda: models.mlp(6, 2, 8, 2), device), Window(after=0)
        train(model, F.mse_loss, x, y, Recipe(epochs=4, batch_size=16), callbacks=[win, Stop(at)],
              checkpoint=path, save_every=0, progress=False)
        return win
    whole = run()
    with pytest.raises(KeyboardInterrupt): run(3, tmp_path / "c")
    again = run(None, tmp_path / "c")
    assert again.n == whole.n >= 4 and again.sums.keys() == whole.sums.keys() != set()
    for k in whole.sums:
        assert again.sums[k].device == device
        close(whole.sums[k], again.sums[k], 1e-6)


def test_dropout_goes_on_with_the_device_s_random_numbers(device, tmp_path):
    whole, _ = trained("watch", device, dropout=True)
    with pytest.raises(KeyboardInterrupt):
        trained("watch", device, 2, tmp_path / "c", dropout=True)
    again, _ = trained("watch", device, None, tmp_path / "c", dropout=True)
    for p, q in zip(whole.parameters(), again.parameters()): close(p, q, 1e-6)


def test_a_checkpoint_moves_to_a_machine_with_fewer_devices(device, tmp_path, monkeypatch):
    "Begun on the device, continued on the host: the random state of what is gone is left out."
    with pytest.raises(KeyboardInterrupt):
        trained("watch", device, 2, tmp_path / "c", polish=4)
    def only_here(where, state):
        if where.type != "cpu": raise RuntimeError(f"there is no {where} here")
        set_random_state(where, state)
    with monkeypatch.context() as m:
        m.setattr("fact_nb.networks.training.set_random_state", only_here)
        model, table = trained("watch", "cpu", None, tmp_path / "c", polish=4)
    same_table(trained("watch", "cpu", polish=4)[1], table)


def test_training_without_float64(narrow):
    model, table = trained("watch", narrow, polish=4)
    same_table(trained("watch", "cpu", polish=4)[1], table, 1e-2)


def test_random_numbers_are_put_back(device):
    "`seeded` fixes the device's own random numbers inside, and restores them after."
    draw = lambda: torch.randn(3, device=device).cpu()
    with seeded(0):
        first = draw()
    before = draw()
    with seeded(0):
        again = draw()
    assert torch.equal(first, again) and not torch.equal(before, first)
    with seeded(1):
        expected = [draw(), draw()]
    with seeded(1):
        a = draw()
        with seeded(2): draw()
        assert torch.equal(a, expected[0]) and torch.equal(draw(), expected[1])


def test_residuals_leave_random_numbers_alone(device):
    model = network(NETS["normed"][0], device)
    x, y = (t.to(device) for t in data(dtype=torch.float32))
    draw = lambda: torch.randn(3, device=device).cpu()
    with seeded(0):
        expected = draw()
    with seeded(0):
        residuals(model, F.mse_loss, Batches(x, y, 16), 1e-2)
        assert torch.equal(draw(), expected)


KERNELS = [kernels.Laplace(3.), kernels.Gaussian(3.), kernels.ExpPower(3., 1.3),
           kernels.Quadratic(), kernels.Polynomial(3, 1.), kernels.Exponential(8.)]


@pytest.mark.parametrize("k", KERNELS, ids=lambda k: type(k).__name__)
def test_kernels(k, device):
    x, _ = data(60)
    for M in (None, torch.eye(6, dtype=x.dtype), torch.ones(6, dtype=x.dtype)):
        def made(X):
            metric = None if M is None else M.to(X)
            return (k(X, None, metric), k(X, X[:5]), *k.value_and_coef(X, None, metric),
                    kernels.kernel_matmul(k, X, None, metric, X))
        for a, b in zip(made(x), made(x.to(device))):
            assert b.device == device
            close(a, b, 1e-9)


@pytest.mark.parametrize("method", ["direct", "cholesky", "refined", "eigh", "packed", "iterative"])
def test_solvers(method, device):
    x, y = data(150)
    name = "cholesky" if method == "refined" else method
    def found(where):
        return solve_kernel_grid(kernels.Laplace(3.), x.to(where), y.to(where), [1e-1, 1.],
                                 method=name, refine=method == "refined")
    for a, b in zip(found("cpu"), found(device)):
        assert b.alpha.device == device
        close(a.alpha, b.alpha, 1e-3 if method == "iterative" else 1e-8)


@pytest.mark.parametrize("method", ["direct", "eigh", "iterative"])
@pytest.mark.parametrize("ridge", [0., 1e-9, .1])
def test_solvers_without_float64(method, ridge, narrow):
    "A ridge that float32 cannot hold is solved by minimum norm, on the device."
    if method == "iterative" and ridge < .1: pytest.skip("needs a ridge")
    x, y = data(80, dtype=torch.float32)
    sol = solve_kernel_grid(kernels.Laplace(3.), x.to(narrow), y.to(narrow), [ridge],
                            method=method)[0]
    assert sol.alpha.device == narrow and sol.alpha.dtype == torch.float32
    if ridge < .1: return
    host = solve_kernel_grid(kernels.Laplace(3.), x.double(), y.double(), [ridge])[0]
    close(host.alpha, sol.alpha, 5e-3)


RFMS = [dict(), dict(geometric=False), dict(update="nfa"), dict(update="stable", normalize=None),
        dict(diagonal=True), dict(keep="loo"), dict(holdout=.2), dict(solver="iterative"),
        dict(solver="packed"),        dict(memory=10**6), dict(metric="error"), dict(kernel=kernels.Quadratic())]


@pytest.mark.parametrize("options", RFMS, ids=str)
def test_rfm_and_its_checkpoint(options, device, tmp_path):
    x, y = data(120)
    make = lambda: RFM(**dict(iters=2, ridge=1e-1, progress=False) | options)
    host = make().fit(x, y)
    there = make().fit(x.to(device), y.to(device), checkpoint=tmp_path / "c")
    assert there.M.device == device and there.alpha.device == device
    close(host.predict(x), there.predict(x.to(device)), 1e-3)
    again = make().fit(x.to(device), y.to(device), checkpoint=tmp_path / "c")
    close(there.alpha, again.alpha)


@pytest.mark.parametrize("options", RFMS, ids=str)
def test_rfm_without_float64(options, narrow):
    x, y = data(120, dtype=torch.float32)
    make = lambda: RFM(**dict(iters=2, ridge=1e-1, progress=False) | options)
    host, there = make().fit(x.double(), y.double()), make().fit(x.to(narrow), y.to(narrow))
    assert there.M.device == narrow and there.M.dtype == torch.float32
    assert rel_err(host.predict(x), there.predict(x.to(narrow)).cpu().double()) < 2e-2


@pytest.mark.parametrize("update", ["fact", "nfa", "stable"])
def test_rfm_killed_and_resumed(update, device, tmp_path):
    x, y = (t.to(device) for t in data(120))
    normalize = None if update == "stable" else "trace"
    make = lambda: RFM(update=update, iters=4, ridge=1e-1, normalize=normalize, progress=False)
    whole, machine = make().fit(x, y), make()
    for fit in machine.iterates(x, y, checkpoint=tmp_path / "c"):
        if fit.t == 2: break
    again = make().fit(x, y, checkpoint=tmp_path / "c")
    close(whole.M, again.M, 1e-10)
    close(whole.alpha, again.alpha, 1e-9)


def probabilities(where, **options):
    x, y = data(80)
    labels = (y[:, 0] > 0).numpy()
    machine = RFMClassifier(device=str(where), **options).fit(x.numpy(), labels)
    return machine.predict_proba(x.numpy())


ESTIMATORS = [dict(), dict(update="nfa"), dict(keep="loo")]


@pytest.mark.parametrize("options", ESTIMATORS, ids=str)
def test_classifier(options, device):
    np.testing.assert_allclose(probabilities("cpu", **options), probabilities(device, **options),
                               atol=1e-6)


@pytest.mark.parametrize("options", ESTIMATORS, ids=str)
def test_classifier_without_float64(options, narrow):
    np.testing.assert_allclose(probabilities("cpu", **options), probabilities(narrow, **options),
                               atol=2e-2)


def test_regressor(device):
    x, y = data(80)
    host, there = (RFMRegressor(device=str(d)).fit(x.numpy(), y.numpy()).predict(x.numpy())
                   for d in ("cpu", device))
    np.testing.assert_allclose(host, there, atol=1e-6)


def test_critical_point_of_a_model_on_the_device(device):
    "The search itself is the host's; the model, its data and the answer stay where they are."
    x, y = data(20)
    make = lambda: models.mlp(6, 2, 4, 1, act=nn.Tanh).double()
    host, there = (network(make, w) for w in ("cpu", device))
    a = train_to_critical(host, F.mse_loss, x, y, 1e-2, iters=50)
    b = train_to_critical(there, F.mse_loss, x.to(device), y.to(device), 1e-2, iters=50)
    assert there[0].weight.device == device and b.theta.device == device
    close(a.theta, b.theta, 1e-6)


def test_critical_point_without_float64(narrow):
    "It needs double precision: one line that says what to do."
    x, y = data(20, dtype=torch.float32)
    model = network(lambda: models.mlp(6, 2, 4, 1, act=nn.Tanh), narrow)
    with pytest.raises(ValueError, match="no float64.*model.cpu()"):
        train_to_critical(model, F.mse_loss, x.to(narrow), y.to(narrow), 1e-2, iters=20)
    assert model[0].weight.dtype == torch.float32


def test_min_norm_point_and_dual_on_the_device(device):
    x, y = data(4)
    make = lambda: models.mlp(6, 2, 8, 1, act=nn.Tanh).double()
    found = []
    for where in ("cpu", device):
        model, X, Y = network(make, where), x.to(where), y.to(where)
        train_to_critical(model, F.mse_loss, X, Y, 1e-4, iters=200)
        min_norm_point(model, X, Y)
        assert model[0].weight.device == torch.device(where)
        found.append(dual_fact(model, X))
    for a, b in zip(*(vars(d).values() for d in found)):
        if isinstance(a, torch.Tensor): close(a, b, 1e-4)


def test_matrices(device):
    A = data(8, 8, dtype=torch.float64)[0]
    S = A @ A.T
    for f in (lambda t: eigh(t)[0], lambda t: psd_power(t, .5), sym_sqrt):
        close(f(S), f(S.to(device)), 1e-8)
        close(f(S), f(S.float().to(device)), 1e-3)
    assert pearson(S.to(device), S.to(device)) == pytest.approx(1)


def test_the_device_is_found_by_name(device):
    assert find_device(str(device)) == device
    assert has_float64(device)


def test_auto_skips_a_device_without_float64(narrow, monkeypatch):
    assert not has_float64(narrow)
    from fact_nb import runtime
    monkeypatch.setattr(runtime, "_best_device", lambda: narrow)
    assert find_device("auto") == narrow
    with pytest.warns(UserWarning, match="no float64.*cpu"):
        assert find_device("auto", wide=True).type == "cpu"
    with pytest.raises(ValueError, match="no float64"):
        find_device(str(narrow), wide=True)
