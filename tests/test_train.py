"""Training under faults: killed at any moment, a run continues as if nothing had happened."""
import json
import math
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fact_nb.networks import training as T
from fact_nb.runtime import seeded
from fact_nb.data.synthetic import one_hot
from fact_nb.networks.models import mlp
from fact_nb.networks.training import Batches, Recipe, residuals, train

# A process of its own: it forks children that train, kills them at random moments, and lets the last one finish.
KILLER = r'''
import json, os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from torch import nn
from torch.nn import functional as F
from fact_nb.runtime import seeded
from fact_nb.networks.training import Recipe, train

path, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

class Norms:                                                  # a callback with a state of its own
    unit = "step"
    def __init__(self): self.sum = 0.
    def __call__(self, model, count): self.sum += float(model[0].weight.detach().norm())
    def state_dict(self): return {"sum": self.sum}
    def load_state_dict(self, s): self.sum = s["sum"]

def run(checkpoint):
    with seeded(0):
        X, y = torch.randn(200, 20), torch.randint(0, 4, (200,))
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(.3), nn.Linear(64, 4))
    norms = Norms()
    r = Recipe(epochs=60, weight_decay=1e-3, batch_size=16, optimizer=sys.argv[4], polish_steps=200, polish_unit=20)
    s = train(model, F.cross_entropy, X, y, r, callbacks=[norms], test=(X[:50], y[:50]), checkpoint=checkpoint, progress=False)
    return dict(weights=[p.tolist() for p in model.parameters()], rows=repr(s.rows), final=repr(s.final), norms=norms.sum)

t = time.time(); whole = run(None); duration = time.time() - t
rnd, hits = random.Random(seed), []
while len(hits) < kills:
    child = os.fork()
    if child == 0:
        try: run(path)
        finally: os._exit(0)
    time.sleep(rnd.uniform(0, 1.5 * duration / kills))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    at = torch.load(path, weights_only=True)["state"] if os.path.exists(path) else dict(epoch=0, phase="none")
    hits.append([at["phase"], at["epoch"]])
    if at["phase"] == "done": break
print(json.dumps(dict(same=run(path) == whole, hits=hits)))
'''


def killed_run(path, kills, seed, optimizer):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", KILLER, str(path), str(kills), str(seed), optimizer], capture_output=True, text=True, env=env, timeout=300)
    assert out.returncode == 0, out.stderr[-2000:]
    return json.loads(out.stdout.splitlines()[-1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("seed,optimizer", [(0, "sgd"), (1, "sgd"), (2, "adam")])
def test_sigkill_at_random_moments_changes_nothing(tmp_path, seed, optimizer):
    "Twelve kills, then to the end: weights, history, callback state all equal bit for bit."
    out = killed_run(tmp_path / "run.pt", 12, seed, optimizer)
    assert out["same"], out["hits"]
    assert len({tuple(h) for h in out["hits"]}) >= 3, out["hits"]       # it was stopped at different places


def small(seed=0, epochs=3, **kw):
    with seeded(seed): X, y, model = torch.randn(60, 5), torch.randint(0, 3, (60,)), mlp(5, 3, 8, hidden=1)
    return model, one_hot(y, 3, torch.float32), X, Recipe(epochs=epochs, batch_size=20, weight_decay=1e-3, **kw)


@pytest.mark.parametrize("moment", ["save", "fsync", "replace"])
def test_a_fault_while_writing_leaves_the_old_checkpoint(tmp_path, monkeypatch, moment):
    "Whatever step of the write fails, the file is the previous complete checkpoint, and the run continues from it."
    path, calls = tmp_path / "run.pt", []
    model, y, X, r = small()
    whole = train(model, F.mse_loss, X, y, r, progress=False)
    place, name = {"save": (torch, "save"), "fsync": (os, "fsync"), "replace": (os, "replace")}[moment]
    real = getattr(place, name)

    def failing(*a, **k):
        calls.append(1)
        if len(calls) == 2:
            if moment == "save": a[1].write(b"half a file")
            raise OSError("disk full")
        return real(*a, **k)

    model, y, X, r = small()
    with monkeypatch.context() as m:
        m.setattr(place, name, failing)
        with pytest.raises(OSError, match="disk full"): train(model, F.mse_loss, X, y, r, checkpoint=path, progress=False)
    assert torch.load(path, weights_only=True)["state"]["epoch"] == 1
    model = small()[0]
    again = train(model, F.mse_loss, X, y, r, checkpoint=path, progress=False)
    assert again.rows == whole.rows and all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.model.parameters()))


def test_a_checkpoint_makes_its_folder_and_leaves_no_litter(tmp_path):
    model, y, X, r = small()
    train(model, F.mse_loss, X, y, r, checkpoint=tmp_path / "new" / "x.pt", progress=False)
    kept = torch.load(tmp_path / "new" / "x.pt", weights_only=True)["state"]["model"]
    assert all(torch.equal(kept[k], v) for k, v in model.state_dict().items())
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["x.pt"]


def test_checkpoint_is_read_without_pickled_code(tmp_path):
    "A checkpoint that would run code is refused, not run."
    class Evil:
        def __reduce__(self): return (os.mkdir, (str(tmp_path / "owned"),))
    path = tmp_path / "evil.pt"
    torch.save({"identity": Evil()}, path)
    model, y, X, r = small()
    with pytest.raises(ValueError, match="is not a checkpoint"): train(model, F.mse_loss, X, y, r, checkpoint=path, progress=False)
    assert not (tmp_path / "owned").exists()


def test_a_refused_checkpoint_leaves_the_model_alone(tmp_path):
    path = tmp_path / "run.pt"
    model, y, X, r = small()
    train(model, F.mse_loss, X, y, r, checkpoint=path, progress=False)
    other, before = small()[0], [p.clone() for p in small()[0].parameters()]
    with pytest.raises(ValueError, match="different epochs, seed"):
        train(other, F.mse_loss, X, y, Recipe(epochs=4, batch_size=20, weight_decay=1e-3, seed=5), checkpoint=path, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), before))


@pytest.mark.parametrize("phase", ["sgd", "polish"])
def test_nonfinite_stops_with_the_last_good_checkpoint(tmp_path, phase):
    path = tmp_path / "run.pt"
    model, y, X, r = small(epochs=2, polish_steps=6, polish_unit=2)
    bad_step = dict(sgd=4, polish=9)[phase]                             # 3 steps an epoch; polishing starts at step 6

    def loss(out, target):
        loss.calls += 1
        return F.mse_loss(out, target) * (math.nan if loss.calls == bad_step + 1 else 1.)
    loss.calls = 0
    real = T.evaluate
    T.evaluate = lambda m, f, d: real(m, F.mse_loss, d)                 # count training calls only
    try:
        with pytest.raises(FloatingPointError, match=rf"loss is nan or inf at step {bad_step} .*phase {phase}.*last good checkpoint is"):
            train(model, loss, X, y, r, checkpoint=path, progress=False)
    finally: T.evaluate = real
    kept = torch.load(path, weights_only=True)["state"]
    assert kept["phase"] == phase and kept["epoch"] == dict(sgd=1, polish=3)[phase]
    assert all(torch.isfinite(v).all() for v in kept["model"].values())


def test_weights_that_overflow_in_the_last_step_are_not_saved(tmp_path):
    path = tmp_path / "run.pt"
    model, y, X, r = small()

    def overflow(model, count):
        if count == 6:
            with torch.no_grad(): model[0].weight[0, 0] = math.inf
    overflow.unit = "step"
    with pytest.raises(FloatingPointError, match="a weight is nan or inf"): train(model, F.mse_loss, X, y, r, callbacks=[overflow], checkpoint=path, progress=False)
    assert torch.isfinite(torch.load(path, weights_only=True)["state"]["model"]["0.weight"]).all()


@pytest.mark.parametrize("seed", range(5))
def test_full_batch_sgd_equals_the_formula(seed):
    "Momentum, weight decay and cosine by hand, in float64, for a two-layer linear network."
    with seeded(seed): X, Y, model = torch.randn(30, 4).double(), torch.randn(30, 2).double(), nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)).double()
    A, B = (m.weight.detach().clone() for m in model)
    vA, vB, lam, lr, steps = 0., 0., .01, .3, 25
    for t in range(steps):
        R = 2 * (X @ A.T @ B.T - Y) / Y.numel()
        gA, gB = B.T @ R.T @ X + lam * A, R.T @ (X @ A.T) + lam * B
        vA, vB = .9 * vA + gA, .9 * vB + gB
        eta = lr / 2 * (1 + math.cos(math.pi * t / steps))
        A, B = A - eta * vA, B - eta * vB
    train(model, F.mse_loss, X, Y, Recipe(epochs=steps, lr=lr, weight_decay=lam, batch_size=30, seed=seed), progress=False)
    assert torch.allclose(model[0].weight, A, atol=1e-12) and torch.allclose(model[1].weight, B, atol=1e-12)


def test_residuals_do_not_depend_on_the_batches():
    with seeded(0): X, y, model = torch.randn(50, 5).double(), torch.randint(0, 3, (50,)), mlp(5, 3, 8, 2).double()
    one, many = (residuals(model, F.cross_entropy, Batches(X, y, k), 1e-2) for k in (50, 7))
    assert one.keys() == many.keys() == {"0", "2", "4"}
    assert all(math.isclose(one[k], many[k], rel_tol=1e-10) for k in one)


def test_too_much_weight_decay_is_called_a_collapse():
    "The same data, the same steps: fitted with little decay, collapsed with much."
    with seeded(0):
        X = torch.randn(200, 10); y = one_hot((X[:, 0] > 0).long() + 2 * (X[:, 1] > 0).long(), 4, torch.float32)
    said = {}
    for lam in (1e-3, .1):
        with seeded(1): model = mlp(10, 4, 32, 2)
        said[lam] = train(model, F.mse_loss, X, y, Recipe(epochs=150, weight_decay=lam, batch_size=50), progress=False).final["collapse"]
    assert said[1e-3] == "" and said[.1] != "", said


def test_frozen_parameters_stay():
    model, y, X, r = small()
    model[0].weight.requires_grad_(False)
    before, bias = model[0].weight.clone(), model[0].bias.clone()
    train(model, F.mse_loss, X, y, Recipe(epochs=1, batch_size=20, polish_steps=1), progress=False)
    assert torch.equal(before, model[0].weight) and not torch.equal(bias, model[0].bias)


def test_bad_data_is_refused():
    model, y, X, r = small()
    with pytest.raises(ValueError, match="60 inputs but 59 targets"): train(model, F.mse_loss, X, y[:59], r, progress=False)
    with pytest.raises(ValueError, match="no samples"): train(model, F.mse_loss, X[:0], y[:0], r, progress=False)


def test_the_bar_shows_unless_switched_off(capfd):
    model, y, X, r = small()
    train(model, F.mse_loss, X, y, r, progress=False)
    assert capfd.readouterr().err == ""
    train(model, F.mse_loss, X, y, r)
    assert "9/9" in (err := capfd.readouterr().err) and "loss=" in err          # 3 epochs of 3 steps


def test_convergence_is_dated():
    "The first epoch at which each criterion was met, whether or not it stops the run."
    model, y, X, _ = small()
    s = train(model, F.mse_loss, X, y, Recipe(epochs=200, batch_size=60, lr=.5, weight_decay=.01, loss_target=.2, residual_target=.5, residual_every=1), progress=False)
    h = s.history
    assert s.loss_epoch == h.epoch[h.loss <= .2].iloc[0] and s.residual_epoch == h.epoch[h.residual <= .5].iloc[0]
    assert s.epoch == 200 and 1 < s.residual_epoch < 200
    never = train(small()[0], F.mse_loss, X, y, Recipe(epochs=2, loss_target=1e-9), progress=False)
    assert never.loss_epoch is None and never.residual_epoch is None


def test_arrays_and_frames_train_as_tensors_do():
    runs = []
    for kind in (lambda t: t, lambda t: t.double().numpy(), lambda t: pd.DataFrame(t.numpy(), index=range(7, 7 + len(t)))):
        model, y, X, r = small()
        runs.append(train(model, F.mse_loss, kind(X), kind(y), r, test=(kind(X), kind(y)), progress=False))
    assert all(run.rows == runs[0].rows and run.final == runs[0].final for run in runs[1:])
    model = torch.nn.Linear(4, 3)
    labels = np.array([0, 1, 2, 1], dtype=np.int32)
    assert train(model, F.cross_entropy, np.eye(4), labels, Recipe(epochs=1), progress=False).data.y.dtype == torch.int64


@pytest.mark.parametrize("kw, message", [
    (dict(X=dict(a=1)), "X must be a tensor or an array with one row per sample, not dict: .*Watch"), (dict(X=[(1, "a")]), "X must be a tensor"),
    (dict(y=None), "y must be a tensor"), (dict(recipe=dict(epochs=1)), "recipe must be a Recipe, not dict: write Recipe"),
    (dict(model=print), "model must be a torch.nn.Module"), (dict(callbacks=print), "callbacks must be a list"),
    (dict(test=dict(X=1)), "test must be a pair .inputs, targets., not dict"), (dict(test=(dict(), 1)), r"test\[0\] must be a tensor")])
def test_wrong_arguments_are_named(kw, message):
    model, y, X, r = small()
    with pytest.raises(TypeError, match=message): train(**(dict(model=model, loss_fn=F.mse_loss, X=X, y=y, recipe=r, progress=False) | kw))


@pytest.mark.parametrize("kw, error, message", [
    (dict(epochs=2.5), ValueError, "epochs must be a whole number ≥ 0, not 2.5"), (dict(epochs="3"), TypeError, "epochs must be a whole number"),
    (dict(momentum=2), ValueError, "momentum must be a number ≥ 0 and < 1, not 2"), (dict(polish_momentum=1), ValueError, "polish_momentum must be"),
    (dict(weight_decay=True), TypeError, "weight_decay must be a number ≥ 0, not True"), (dict(lr=float("inf")), ValueError, "lr must be a positive finite number, not inf"),
    (dict(batch_size=2.5), ValueError, "batch_size must be a whole number ≥ 1"), (dict(seed=.5), ValueError, "seed must be a whole number"),
    (dict(loss_target="low"), TypeError, "loss_target must be a number")])
def test_a_recipe_with_a_wrong_number_is_refused(kw, error, message):
    with pytest.raises(error, match=message): Recipe(**kw)


def test_other_files_are_no_checkpoints(tmp_path):
    model, y, X, r = small()
    go = lambda path: train(model, F.mse_loss, X, y, r, checkpoint=path, progress=False)
    torch.save(dict(a=1), tmp_path / "other.pt")
    with pytest.raises(ValueError, match="not a checkpoint of `train`: delete it or pass resume=False"): go(tmp_path / "other.pt")
    with pytest.raises(ValueError, match="is a folder: give the name of a file in it"): go(tmp_path)
