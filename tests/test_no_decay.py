"""Relations without weight decay and for AdamW: against plain torch, resumed, on other models, and with bad input."""
import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fact_nb.linalg import pearson, rel_err
from fact_nb.runtime import seeded
from fact_nb.networks.critical_points import train_to_critical
from fact_nb.experiments import no_decay as exp
from fact_nb.networks.models import CharTransformer, cnn, mlp
from fact_nb.networks.zero_decay import MeanStep, adam_step, dual_fact, dual_weights, min_norm_point, output_jacobian
from fact_nb.lab.experiment import Context, UsageError, override
from fact_nb.networks.training import Recipe, cross_entropy, train

SMALL = replace(exp.presets["quick"], images=60, width=8, steps=(60, 60), kappas=(1.,), taus=(3.,), motion_lrs=(.02,), motion_time=.4)
context = lambda path: Context(torch.device("cpu"), Path(path), False)


def points(n=6, d=3):
    with seeded(5): return torch.randn(n, d).double(), torch.randn(n, 2).double()


def a_net(d=3, seed=0):
    with seeded(seed): return nn.Sequential(nn.Linear(d, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


# --- dual weights


def test_dual_weights_are_the_losses_slopes_at_a_critical_point_of_cross_entropy():
    X, _ = points(); y = torch.tensor([0, 1, 1, 0, 1, 0]); net, lam = a_net(), 1e-2
    c = train_to_critical(net, F.cross_entropy, X, y, lam, iters=1000)
    D = dual_fact(net, X)
    slopes = (net(X).detach().softmax(1) - F.one_hot(y, 2)).reshape(-1)
    assert c.grad_norm < 1e-10 and D.off < 1e-7
    # the two outputs enter cross-entropy as a difference only, so α is fixed by the part that J sees
    _, J, _ = output_jacobian(net, X)
    assert rel_err(J.T @ D.alpha, J.T @ (-slopes / (6 * lam))) < 1e-6


def test_the_relation_notices_that_samples_or_weights_are_not_those_of_the_critical_point():
    X, Y = points(); net = a_net()
    train_to_critical(net, F.mse_loss, X, Y, 1e-3, iters=2000)
    assert dual_fact(net, X).off < 1e-7 < .02 < dual_fact(net, points(6, 3)[0].flip(1)).off
    with torch.no_grad(): net[2].weight.add_(torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).double() * .1)
    assert dual_fact(net, X).off > .02


def test_a_convolution_and_a_frozen_layer():
    with seeded(0): net, X = nn.Sequential(nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double(), torch.randn(5, 1, 6).double()
    D = dual_fact(net, X)
    assert D.fact["0"].shape == (3, 3) and D.fact["3"].shape == (12, 12)
    alpha, total = D.alpha.view(5, 2), torch.zeros(3, 3).double()
    for i in range(5):                                              # patches, one at a time, by the definition
        P = X[i, 0].unfold(0, 3, 1).clone().requires_grad_()
        out = net[3](torch.tanh(P @ net[0].weight[:, 0].T + net[0].bias).T.reshape(-1))
        for l in range(2): total += alpha[i, l] * torch.autograd.grad(out[l], P, retain_graph=True)[0].T @ P.detach()
    assert rel_err(total, D.fact["0"]) < 1e-10
    net[0].weight.requires_grad_(False)
    assert list(dual_fact(net, X).fact) == ["3"]


def test_duplicate_samples_do_not_disturb_the_projection():
    X, _ = points(); net = a_net()
    once, twice = dual_fact(net, X), dual_fact(net, torch.cat([X, X]))
    assert once.rank == twice.rank == 12 and abs(once.off - twice.off) < 1e-9 and rel_err(once.fact["2"], twice.fact["2"]) < 1e-9


def test_more_samples_bring_untrained_weights_nearer_until_it_is_refused():
    net = a_net()                                                  # 54 parameters
    off = [dual_fact(net, points(n)[0]).off for n in (2, 6, 12, 24)]
    assert off == sorted(off, reverse=True) and off[0] > .8
    with pytest.raises(ValueError, match="54 outputs for 54 parameters"): dual_fact(net, points(27)[0])
    assert dual_fact(net, points(30)[0], identical=True).off < 1e-9


def test_min_norm_point_is_a_critical_point_of_the_norm_among_exact_fits():
    X, Y = exp.regression(10, 0); net = exp.small_net((8, 6), 0)
    assert min_norm_point(copy.deepcopy(net), X, Y).grad_norm > 1e-3                        # from far away Newton does not get there, and says so
    train_to_critical(net, F.mse_loss, X, Y, 1e-4, iters=1500)
    for lam in (1e-4, 1e-7, 0.): c = min_norm_point(net, X, Y, lam)
    theta, J, f = output_jacobian(net, X)
    assert c.grad_norm < 1e-9 and (f(theta) - Y.reshape(-1)).abs().max() < 1e-9
    # along the fits (the null space of J) the norm does not change to first order
    null = torch.linalg.svd(J)[2][20:]
    assert (null @ theta).norm() < 1e-8 * theta.norm()


# --- AdamW


def steps_of(net, opt, data, n, seed=0):
    "n steps on random batches, with u of every step by the weights alone."
    X, y = data; gen, us = torch.Generator().manual_seed(seed), []
    W, g = net[0].weight, opt.param_groups[0]
    for _ in range(n):
        i = torch.randperm(len(X), generator=gen)[:16]
        opt.zero_grad(); F.cross_entropy(net(X[i]), y[i]).backward(); old = W.detach().clone()
        opt.step(); us.append(((1 - g["lr"] * g["weight_decay"]) * old - W.detach()) / g["lr"])
    return us


def digit_net():
    with seeded(0): net, X, y = mlp(6, 3, 8, hidden=1).double(), torch.randn(40, 6).double(), torch.randint(0, 3, (40,))
    return net, (X, y)


@pytest.mark.parametrize("kw", [dict(), dict(amsgrad=True), dict(betas=(.8, .95), eps=1e-4), dict(maximize=True), dict(foreach=True)])
def test_three_ways_to_the_same_mean_step(kw):
    net, data = digit_net(); opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=.2, **kw)
    m = MeanStep(net, opt, start=5, steps=20); us = []
    hook = opt.register_step_post_hook(lambda o, a, k: us.append(adam_step(o.state[net[0].weight], o.param_groups[0]).clone()))
    brute = steps_of(net, opt, data, 40); hook.remove()
    for mean in (torch.stack(brute[5:25]).mean(0), torch.stack(us[5:25]).mean(0)): assert rel_err(mean, m.mean("0")) < 1e-8
    assert rel_err(torch.stack(brute).mean(0), m.mean("0")) > 1e-3   # the window matters


def test_a_schedule_weighs_each_step_by_its_learning_rate():
    net, data = digit_net(); opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=.2)
    m, etas, us = MeanStep(net, opt), [], []
    for k in range(10):
        opt.param_groups[0]["lr"] = eta = 1e-2 / (k + 1); etas.append(eta); us += steps_of(net, opt, data, 1, k)
    mean = sum(e * u for e, u in zip(etas, us)) / sum(etas)
    assert rel_err(mean, m.mean("0")) < 1e-8 and rel_err(torch.stack(us).mean(0), m.mean("0")) > 1e-3


def test_the_mean_gradient_is_that_of_the_window():
    net, (X, y) = digit_net(); opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=.2)
    m, gs = MeanStep(net, opt, start=2, steps=3, gradient=True), []
    for _ in range(7): opt.zero_grad(); F.cross_entropy(net(X), y).backward(); gs.append(net[0].weight.grad.clone()); opt.step()
    assert rel_err(torch.stack(gs[2:5]).mean(0), m.grads["0"] / m.eta["0"]) < 1e-12
    W = m.first["0"]; assert abs(m.table().gradient[0] - pearson(W.T @ W, -W.T @ torch.stack(gs[2:5]).mean(0))) < 1e-9


def test_anchor_start_and_end_are_the_weights_there():
    net, data = digit_net(); opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=.2)
    m = MeanStep(net, opt, start=10, steps=10); Ws = [net[0].weight.detach().clone()]
    for k in range(30): steps_of(net, opt, data, 1, k); Ws.append(net[0].weight.detach().clone())
    for anchor, W in (("start", Ws[10]), ("end", Ws[20])): assert abs(m.table(anchor).r[0] - rel_err(W.T @ W, -W.T @ m.mean("0") / .2)) < 1e-9
    assert m.table("start").r[0] != m.table("end").r[0]


def test_decay_by_group_and_an_unused_layer():
    net, (X, y) = digit_net()
    opt = torch.optim.AdamW([dict(params=net[0].parameters(), weight_decay=.5), dict(params=net[2].parameters(), weight_decay=.1)], lr=1e-2)
    m = MeanStep(net, opt)
    opt.zero_grad(); F.cross_entropy(net[2](torch.zeros(4, 8).double()), y[:4]).backward(); opt.step()      # the first layer is not used
    assert list(m.first) == ["2"] and m.lam["2"] == .1
    steps_of(net, opt, (X, y), 3); assert m.lam == {"0": .5, "2": .1} and abs(m.eta["2"] - 4e-2) < 1e-12 and abs(m.eta["0"] - 3e-2) < 1e-12


def test_an_interrupted_training_ends_with_the_same_mean(tmp_path):
    X, y = exp.digit_data(SMALL); recipe = Recipe(epochs=6, lr=1e-2, weight_decay=.3, batch_size=20, optimizer="adamw", schedule="constant")
    def new():
        with seeded(0): net = mlp(64, 10, 8, hidden=1)
        return net, MeanStep(net, start=5, steps=10, gradient=True)
    net, whole = new(); train(net, cross_entropy, X, y, recipe, callbacks=[whole], progress=False)
    class Stop(Exception): pass
    def stop(model, count):
        if count == 4: raise Stop
    net, part = new()
    with pytest.raises(Stop): train(net, cross_entropy, X, y, recipe, callbacks=[part, stop], checkpoint=tmp_path / "c", progress=False)
    net, part = new(); train(net, cross_entropy, X, y, recipe, callbacks=[part, lambda model, count: None], checkpoint=tmp_path / "c", progress=False)
    assert whole.table().equals(part.table()) and whole.count == part.count == 18


def test_an_embedding_is_compared_on_its_left_side():
    with seeded(0): net = CharTransformer(9, 8, context=4, blocks=1); X = torch.randint(0, 9, (6, 4))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=.3); m = MeanStep(net, opt)
    for _ in range(5): opt.zero_grad(); cross_entropy(net(X), X).backward(); opt.step()
    t = m.table().set_index("layer"); E = m.first["token"]
    assert E.shape == (8, 9) and abs(t.r["token"] - rel_err(E @ E.T, -E @ m.mean("token").T / .3)) < 1e-5
    assert {"blocks.0.attn.q", "blocks.0.mlp.2", "head", "position"} <= set(t.index)


def test_noise_satisfies_the_end_of_the_window_and_not_its_start():
    rows = pd.DataFrame([r for s in range(3) for r in exp.noise_unit(replace(exp.presets["cpu"], width=32, kappas=(1., 3.)), dict(seed=s)).rows])
    assert rows.end.min() > .75 and abs(rows.pearson.mean()) < .25


def test_other_optimizers_are_refused():
    net = nn.Linear(3, 2)
    for opt in (torch.optim.SGD(net.parameters(), lr=.1, weight_decay=.1), torch.optim.Adam(net.parameters(), weight_decay=.1)):
        with pytest.raises(TypeError, match="no decoupled weight decay"): MeanStep(net, opt)
    with pytest.raises(ValueError, match="start must be 0 or more"): MeanStep(net, start=-1)


# --- the experiment


def test_every_option_changes_something(tmp_path):
    base = {p: exp.run_unit(SMALL, u, context(tmp_path)).rows for p, u in
            (("adamw", dict(part="adamw", model="mlp", tau=3., seed=0)), ("motion", dict(part="motion", lr=.02, seed=0)), ("empty", dict(part="empty", seed=0)))}
    again = lambda p, u, **kw: exp.run_unit(replace(SMALL, **kw), u, context(tmp_path)).rows
    u = dict(part="adamw", model="mlp", tau=3., seed=0)
    for kw in (dict(lr=3e-3), dict(steps=(90, 60)), dict(images=50), dict(width=6)): assert again("adamw", u, **kw)[0]["pearson"] != base["adamw"][0]["pearson"], kw
    assert len(again("adamw", u, kappas=(.3, 1.))) == 2 * len(base["adamw"])
    assert again("adamw", u | dict(seed=1))[0]["pearson"] != base["adamw"][0]["pearson"]
    assert again("motion", dict(part="motion", lr=.02, seed=0), motion_time=.8)[0]["steps"] == 2 * base["motion"][0]["steps"]
    assert [r["n"] for r in again("empty", dict(part="empty", seed=0), ns=(3,))] == [3, 3, 3]
    assert again("empty", dict(part="empty", seed=0), widths=(9, 6))[0]["r"] != base["empty"][0]["r"]
    z = dict(part="zero", scale=1., seed=0); short = again("zero", z, zero_steps=30)
    assert short[0]["steps"] == 30 and again("zero", z, zero_steps=30, zero_lr=.01)[0]["loss"] > short[0]["loss"] and again("zero", z, zero_steps=30, n=5)[0]["r"] != short[0]["r"]
    assert again("zero", z | dict(scale=.5), zero_steps=30)[0]["growth"] > short[0]["growth"]
    l = dict(part="limit", seed=0); few = again("limit", l, lams=(1e-3,), iters=20)
    assert [r["lam"] for r in few] == [1e-3] * 3 + [0.] * 3 and few[0]["grad_norm"] > 1e-9


def test_units_of_all_parts():
    c = exp.presets["cpu"]; u = exp.units(c)
    assert len(u) == 3 * (1 + 1 + len(c.scales) + len(c.motion_lrs) + 2 * len(c.taus) + 1) and {x["part"] for x in u} == set(exp.PARTS)
    assert len(exp.units(replace(c, parts=("noise",), seeds=2))) == 2


def adamw_rows(pearson_long=.95, pearson_short=.5, fact=.3, seeds=3, **more):
    "A made-up result of part adamw."
    rows = [dict(part="adamw", model=m, layer=str(k), tau=t, seed=s, pearson=pearson_long if t >= 10 else pearson_short, r=.2, gradient=.6, fact=fact, end=.99, judged=True, left=1., kappa=1.) | more
            for m in ("mlp", "transformer") for k in range(3) for t in (.3, 1., 10., 30.) for s in range(seeds)]
    return pd.DataFrame(rows)


class Fake:
    def __init__(self, df): self.df = df


def test_judges_of_adamw():
    verdict = lambda j, df: (v := j(Fake(df))) and v.verdict
    assert verdict(exp.judge_step, adamw_rows()) == "holds" and verdict(exp.judge_where, adamw_rows()) == "holds"
    assert verdict(exp.judge_step, adamw_rows(seeds=2)) is None and verdict(exp.judge_where, adamw_rows(seeds=2)) is None
    one = adamw_rows(); one.loc[(one.tau == 10) & (one.layer == "1") & (one.seed == 2) & (one.model == "mlp"), "pearson"] = .79
    assert verdict(exp.judge_step, one) == "differs" and verdict(exp.judge_where, one) == "differs"
    assert verdict(exp.judge_step, adamw_rows(fact=.97)) == "differs"                       # not above plain FACT
    assert verdict(exp.judge_where, adamw_rows(pearson_short=.9)) == "differs" and verdict(exp.judge_step, adamw_rows(pearson_short=.9)) == "holds"
    dead = one.assign(left=np.where(one.pearson == .79, 1e-5, 1.)); assert verdict(exp.judge_step, dead) == "holds" and "1 decayed" in exp.judge_step(Fake(dead)).note
    assert exp.judge_step(Fake(one.assign(judged=one.pearson != .79))).verdict == "holds"      # other windows are not judged


def test_judge_of_the_sum_over_steps():
    rows = lambda big, small, exact=1e-14, seeds=3: pd.DataFrame([dict(part="motion", lr=lr, seed=s, layer=k, change=c, r_exact=exact) for lr, c in ((.1, big), (.01, small)) for s in range(seeds) for k in "02"])
    verdict = lambda *a, **k: (v := exp.judge_motion(Fake(rows(*a, **k)))) and v.verdict
    assert verdict(.995, .999) == "holds" and verdict(.9, .999) == "holds with a change" and verdict(.9, .98) == "differs" and verdict(.995, .999, 1e-7) == "differs"
    assert verdict(.995, .98) == "differs" and verdict(.995, .999, seeds=2) is None


def test_bad_settings_say_what_to_do():
    for text, says in (("n=400", "any weights"), ("lams=0", "positive and falling"), ("parts=x", "among limit"), ("images=5", "between 20"), ("steps=10,10", "20 or more"), ("kappas=.1", "contain 1"), ("scales=-1", "must be positive")):
        with pytest.raises(UsageError, match=says): override(exp.presets["cpu"], [text])


def test_the_optimizer_of_another_model_is_refused():
    one, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match="make it from model.parameters.. of the same model"): MeanStep(one, torch.optim.AdamW(other.parameters()))
