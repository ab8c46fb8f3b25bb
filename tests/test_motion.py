"""The moving average of FACT: against formulas in plain torch, over options, faults and checkpoints; and its experiment."""
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fact_nb.networks import moving_average as M
from fact_nb.linalg import pearson, rel_err
from fact_nb.runtime import seeded
from fact_nb.experiments import motion as E
from fact_nb.networks.models import CharTransformer, cnn, mlp
from fact_nb.networks.moving_average import Motion, flow_rate
from fact_nb.lab.experiment import Context, UsageError, override, replace
from fact_nb.lab.workers import run_experiment as run
from fact_nb.lab.image_networks import images
from fact_nb.networks.training import Recipe, cross_entropy, train

TURN = dict(forward=lambda W: W, backward=lambda W: W.T)
OPTIONS = [dict(), dict(momentum=.9), dict(momentum=.9, nesterov=True), dict(momentum=.7, dampening=.4), dict(momentum=.5, maximize=True), dict(maximize=True)]


def problem(seed=0):
    with seeded(seed): return mlp(6, 3, 8, 2).double(), torch.randn(40, 6).double(), torch.randn(40, 3).double()


def steps(model, X, Y, opt, n, schedule=None, begin=0):
    for i in range(begin, n):
        j = torch.arange(8) + 8 * (i % 5)
        opt.zero_grad(); F.mse_loss(model(X[j]), Y[j]).backward(); opt.step()
        if schedule: schedule.step()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lam", [0., .05])
def test_the_sum_of_the_steps_is_the_change(options, lam):
    "Every kind of SGD step, with a scheduler of torch's; N is formed from copies of the weights, by torch alone."
    model, X, Y = problem(); old = {k: p.detach().clone() for k, p in model.named_parameters()}
    opt = torch.optim.SGD(model.parameters(), lr=.02, weight_decay=lam, **options)
    m = Motion(model, opt, exact=True)
    steps(model, X, Y, opt, 50, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 50))
    for side, turn in TURN.items():
        for k, t in getattr(m, side).items():
            A, B = turn(old[f"{k}.weight"]), turn(dict(model.named_parameters())[f"{k}.weight"].detach())
            assert rel_err(B.T @ B - A.T @ A, t.exact - t.start) < 1e-9 and rel_err(t.start, A.T @ A) < 1e-14


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_average_by_its_formula(every, fused):
    "In torch alone, with a changing rate, different decays, and a fused kernel."
    model, X, Y = problem(1); groups = [dict(params=[p], weight_decay=.01 * i) for i, p in enumerate(model.parameters())]
    opt = torch.optim.SGD(groups, lr=.05, momentum=.8, fused=fused); schedule = torch.optim.lr_scheduler.ExponentialLR(opt, .95)
    W = model[2].weight; ema, H, h, lam = (W.T @ W).detach(), 0., 0., groups[2]["weight_decay"]
    m = Motion(model, opt, every=every)
    for i in range(12):
        opt.zero_grad(); F.mse_loss(model(X), Y).backward()
        eta = .05 * .95**i / .2; H, h = H + eta * W.grad, h + eta
        if (i + 1) % every == 0:
            P = (W.T @ H).detach(); ema, H, h = (1 - 2 * h * lam) * ema - P - P.T, 0., 0.
        opt.step(); schedule.step()
    assert rel_err(ema, m.forward["2"].ema) < 1e-12 and lam == .02


def test_names_and_kinds_of_layers():
    "Convolutions, embeddings, attention and tied weights, named as measure names them."
    from fact_nb.networks.measure import measure
    with seeded(2): nets = [(cnn(3, (4, 4), size=8, inputs=1), torch.randn(6, 1, 8, 8), torch.randn(6, 3), F.mse_loss), (CharTransformer(7, 8, context=5), torch.randint(0, 7, (6, 5)), torch.randint(0, 7, (6, 5)), cross_entropy)]
    for net, X, Y, loss in nets:
        net = net.double(); X = X.double() if X.is_floating_point() else X; Y = Y.double() if Y.is_floating_point() else Y
        opt = torch.optim.SGD(net.parameters(), lr=.05, momentum=.9, weight_decay=.01); m = Motion(net, opt, exact=True)
        for _ in range(6): opt.zero_grad(); loss(net(X), Y).backward(); opt.step()
        assert list(m.forward) == list(measure(net, loss, [(X, Y)], .01).entries)
        assert (m.table().r_exact < 1e-9).all()
    tied = nn.Sequential(a := nn.Linear(3, 3), nn.ReLU(), a)
    assert list(Motion(tied).forward) == ["0"]


def test_frozen_and_unused_weights():
    "A layer that is frozen is not followed; one that got no gradient is left alone, decay and all, as SGD does."
    model, X, Y = problem(); model[0].requires_grad_(False)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=.1, weight_decay=.5)
    m = Motion(model, opt); assert list(m.forward) == ["2", "4"]
    model[4](torch.randn(5, 8).double()).sum().backward(); opt.step()
    assert rel_err(m.forward["2"].start, m.forward["2"].ema) == 0 and rel_err(m.forward["4"].start, m.forward["4"].ema) > 0


def test_nothing_is_disturbed_and_stop_lets_go():
    model, X, Y = problem(); other = copy.deepcopy(model); nets = []
    for net, watched in ((model, True), (other, False)):
        opt = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9); m = Motion(net, opt, exact=True, every=2) if watched else None
        steps(net, X, Y, opt, 10); nets.append(opt)
        if watched: m.stop(); n = m.count; steps(copy.deepcopy(net), X, Y, nets[0], 1); assert m.count == n == 10 and not m.hooks
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


@pytest.mark.parametrize("options", [dict(every=1), dict(every=4), dict(every=4, between="skip"), dict(every=4, midpoint=True), dict(every=3, exact=True, columns=4), dict(backward=False)], ids=str)
def test_saved_and_restored_in_a_loop_of_ones_own(options, tmp_path):
    "Saved at step 10, in the middle of a block, through a file, into a new Motion on a new model."
    def fresh():
        model, X, Y = problem(3); opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9, weight_decay=.01)
        return model, X, Y, opt, Motion(model, opt, **options)
    model, X, Y, opt, whole = fresh(); steps(model, X, Y, opt, 25)
    model, X, Y, opt, part = fresh(); steps(model, X, Y, opt, 10)
    torch.save(dict(model=model.state_dict(), opt=opt.state_dict(), motion=part.state_dict()), tmp_path / "a.pt")
    model, X, Y, opt, rest = fresh(); saved = torch.load(tmp_path / "a.pt", weights_only=True)
    model.load_state_dict(saved["model"]); opt.load_state_dict(saved["opt"]); rest.load_state_dict(saved["motion"]); steps(model, X, Y, opt, 25, begin=10)
    assert rest.count == 25 and rest.table().equals(whole.table())
    assert all(torch.equal(a.ema, b.ema) for a, b in zip(whole.forward.values(), rest.forward.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_averaged_in_float32(dtype):
    "A decay of 1 − 2ηλ = .9998 is 1 in bfloat16."
    with seeded(4): layer = nn.Linear(8, 8, bias=False).to(dtype)
    opt = torch.optim.SGD(layer.parameters(), lr=.01, weight_decay=.01); m = Motion(layer, opt, every=5)
    for _ in range(500): layer.weight.grad = torch.zeros_like(layer.weight); opt.step()
    t = m.forward["model"]
    assert t.ema.dtype == torch.float32 and abs(float(t.ema.trace() / t.start.trace()) - .9998**500) < 2e-3


@pytest.mark.parametrize("midpoint", [False, True])
def test_train_hands_over_both_optimizers_and_resumes(midpoint, tmp_path):
    r = Recipe(epochs=5, lr=.05, weight_decay=.01, batch_size=16, polish_steps=6, polish_unit=2, polish_lr=.02)
    def go(path, at=None):
        model, X, Y = problem(5); m = Motion(model, every=4, exact=True, midpoint=midpoint)
        def stop(net, count):
            if count == at: raise KeyboardInterrupt
        try: train(model, F.mse_loss, X, Y, r, callbacks=[m, stop], checkpoint=path, progress=False)
        except KeyboardInterrupt: pass
        return m
    whole = go(None); assert whole.count == 5 * 3 + 6 and (whole.table().r_exact < 1e-9).all()
    for at in (1, 3, 6, 7): go(tmp_path / f"{at}.pt", at); assert go(tmp_path / f"{at}.pt").table().equals(whole.table())


def test_flow_rate_is_what_one_gradient_moves_in_the_end():
    for kw in (dict(), dict(momentum=.9), dict(momentum=.9, nesterov=True), dict(momentum=.6, dampening=.5)):
        p = nn.Parameter(torch.zeros(1).double()); opt = torch.optim.SGD([p], lr=.1, **kw); moved = []
        for i in range(400):
            p.grad = torch.ones(1).double() if i == 1 else torch.zeros(1).double()      # not the first: it is not dampened
            opt.step()
        assert abs(-float(p.detach()) - flow_rate(opt.param_groups[0])) < 1e-9, (kw, moved)


SMALL = replace(E.presets["quick"], n=100, width=16, hidden=2, layers=2, epochs=6, exact_epochs=3, flow_time=1.)


def rows(cfg, tmp_path, **unit):
    import pandas as pd
    return pd.DataFrame(E.run_unit(cfg, unit, Context(torch.device("cpu"), tmp_path, False, save_every=0.)).rows)


def test_settings_of_the_experiment_change_it(tmp_path, monkeypatch):
    counter = iter(range(100)); fresh = lambda: (tmp_path / str(next(counter)))
    monkeypatch.setattr(E, "images", lambda name, n=0: images("digits", n))
    monkeypatch.setattr(E, "costs", lambda *a: [])
    go = lambda dataset="digits", **kw: rows(replace(SMALL, **kw), fresh(), part="network", dataset=dataset, seed=0)
    base = go(); value = lambda d, c="average": d[(d.kind == "look") & (d.epoch == d.epoch.max())][c].tolist()
    assert len(value(base)) == 4 and len(value(go(layers=1))) == 2
    for kw in (dict(lr=.05), dict(momentum=.5), dict(lam=2e-3), dict(n=80), dict(width=12), dict(batch=20), dict(epochs=4), dict(hidden=3), dict(schedule="constant")): assert value(go(**kw)) != value(base), kw
    other = go(every=3); assert value(other) == value(base) and value(other, "r_cheap") != value(base, "r_cheap") and value(other, "skip") != value(base, "skip")
    few, many, wide = go("cifar10", columns_cifar10=5, width_cifar10=16), go("cifar10", columns_cifar10=0, width_cifar10=16), go("cifar10", width_cifar10=12, columns_cifar10=0)
    assert value(many) == value(base) != value(few) and value(wide) != value(many)
    unit = dict(part="exact", seed=0)
    assert rows(SMALL, fresh(), **unit).steps[0] == 15 and rows(replace(SMALL, exact_epochs=4), fresh(), **unit).steps[0] == 20
    flow = lambda cfg, rate: rows(cfg, fresh(), part="flow", rate=rate).r.max()
    assert flow(SMALL, .1) > 1.5 * flow(SMALL, .05) and flow(SMALL, .1) != flow(replace(SMALL, flow_time=2.), .1)
    keys = lambda **kw: len(E.units(replace(SMALL, **kw)))
    assert keys() == 1 + 1 + 2 and keys(seeds=2) == 5 and keys(exact_seeds=2) == 5 and keys(rates=(.1, .05, .02)) == 5 and keys(datasets=("mnist", "cifar10")) == 5


@pytest.mark.parametrize("kw, message", [(dict(layers=9), "layers must be between"), (dict(every=1), "every must be at least 2"), (dict(rates=(.1,)), "two or more positive"), (dict(exact_seeds=0), "exact_seeds at least 1"), (dict(columns_cifar10=-1), "not negative")], ids=str)
def test_bad_settings_are_named(kw, message):
    with pytest.raises(UsageError, match=message): replace(SMALL, **kw)


@pytest.mark.parametrize("field", ["polish=5", "window=3", "at_paper=mnist", "at_quick=digits"])
def test_what_belongs_to_other_experiments_is_refused(field):
    with pytest.raises(UsageError, match="unknown field"): override(SMALL, [field])


@pytest.mark.parametrize("swap", ["noise", "reversed", "shuffled"])
def test_quick_fails_when_the_gradient_is_not_the_loss_gradient(swap, tmp_path, monkeypatch):
    "The average of something else than FACT is found out: noise of the same size, the wrong sign, another sample's pairing."
    look, g = M.take_look, torch.Generator().manual_seed(0)
    def wrong(t, A, H, decay):
        other = dict(noise=lambda: torch.randn(H.shape, generator=g) * H.norm() / H.numel()**.5, reversed=lambda: -H, shuffled=lambda: H[torch.randperm(len(H), generator=g)])[swap]()
        look(t, A, other, decay)
    monkeypatch.setattr(M, "take_look", wrong); monkeypatch.setattr(E, "costs", lambda *a: [dict(kind="cost", quantity=f"{q}, forward", share=0.) for q in E.KINDS])
    r = run(E.experiment, "quick", ["epochs=25", "exact_epochs=2"], results=tmp_path, progress=False, device="cpu")
    assert E.judge_change(r).verdict == "differs" and E.judge_tracks(r).verdict == "differs" and E.judge_exact(r).verdict == "differs"


def test_a_stopped_network_continues_with_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(E, "costs", lambda *a: []); unit = dict(part="network", dataset="digits", seed=0)
    whole = rows(SMALL, tmp_path / "a", **unit); call = E.Look.__call__
    def stop(self, net, epoch):
        if epoch == 4: raise KeyboardInterrupt
        call(self, net, epoch)
    with monkeypatch.context() as mp:
        mp.setattr(E.Look, "__call__", stop)
        with pytest.raises(KeyboardInterrupt): rows(SMALL, tmp_path / "b", **unit)
    assert (tmp_path / "b" / "train.pt").exists()
    assert rows(SMALL, tmp_path / "b", **unit).equals(whole)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("every", [1, 5])
def test_midpoints_drop_nothing(options, every):
    "Without decay the midpoint form is the exact change, with every kind of step, noisy and large; the plain form is not."
    model, X, Y = problem(6); opt = torch.optim.SGD(model.parameters(), lr=.01, **options)
    mid, plain = Motion(model, opt, every=every, midpoint=True), Motion(model, opt, every=every)
    steps(model, X, Y, opt, 30, torch.optim.lr_scheduler.ExponentialLR(opt, .97))
    assert (mid.table().r_change < 1e-9).all() and (plain.table().r_change > 1e-4).all()


def test_midpoints_with_decay_are_off_only_by_the_decay():
    "The error shrinks with λ, to the same training."
    def error(lam):
        model, X, Y = problem(7); opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9, weight_decay=lam); m = Motion(model, opt, every=5, midpoint=True)
        steps(model, X, Y, opt, 40); return m.table().r_change.max()
    assert error(1e-3) < error(1e-2) / 5 < .01


def test_the_optimizer_of_another_model_is_refused():
    one, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match="make it from model.parameters.. of the same model"): Motion(one, torch.optim.SGD(other.parameters(), lr=.1))
