"""Watching must not disturb: on several kinds of models, in any state, also when measuring fails."""
import copy
import math

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fact_nb.runtime import seeded
from fact_nb.networks.models import CharTransformer, TwoLayerQuadratic, cnn, linear_network, mlp
from fact_nb.networks.training import Batches, Recipe, cross_entropy, train
from fact_nb.networks.watch import Watch


def cases():
    with seeded(0):
        yield "mlp", mlp(6, 3, 8, 2), torch.randn(12, 6), torch.randint(0, 3, (12,)), cross_entropy
        yield "cnn", cnn(3, (4, 4), size=8, inputs=1), torch.randn(12, 1, 8, 8), torch.randn(12, 3), F.mse_loss
        yield "transformer", CharTransformer(7, 8, context=5), torch.randint(0, 7, (12, 5)), torch.randint(0, 7, (12, 5)), cross_entropy
        yield "quadratic", TwoLayerQuadratic(4, 5), torch.randn(12, 4), torch.randn(12, 1), F.mse_loss
        yield "linear", linear_network(4, 2, 6, L=3), torch.randn(12, 4), torch.randn(12, 2), F.mse_loss


CASES = {name: rest for name, *rest in cases()}


def state(model):
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return copy.deepcopy(model.state_dict()), grads, [m.training for m in model.modules()], torch.get_rng_state()


def same(a, b):
    eq = lambda x, y: (x is None and y is None) or torch.equal(x, y)
    return all(eq(a[0][k], b[0][k]) for k in a[0]) and all(eq(a[1][k], b[1][k]) for k in a[1]) and a[2] == b[2] and torch.equal(a[3], b[3])


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_left_as_it_was(name):
    model, X, y, loss = CASES[name]
    model.zero_grad(); loss(model(X), y).backward()                     # gradients to be left alone
    next(model.children()).eval()                                       # a mode to be left alone
    before = state(model)
    w = Watch(loss, Batches(X, y, 5), .1, agop="sketch", probes=2)
    assert w(model, 0) is not None and same(before, state(model))
    assert {"FACT", "AGOP", "eNFA", "residual"} <= set(w.history.quantity)
    assert w.history.value.notna().all() and list(w.history.columns) == ["epoch", "layer", "quantity", "similarity", "value"]


@pytest.mark.parametrize("name", CASES)
def test_watching_does_not_change_training(name):
    model, X, y, loss = CASES[name]
    one, two = copy.deepcopy(model), copy.deepcopy(model)
    r = Recipe(epochs=3, lr=.01, weight_decay=.01, batch_size=5, polish_steps=2)
    train(one, loss, X, y, r, progress=False)
    w = Watch(loss, Batches(X, y, 5), .01, every=2, unit="step", quantities=["fact"])
    train(two, loss, X, y, r, callbacks=[w], progress=False)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    assert sorted(set(w.history.step)) == [0, 2, 4, 6, 8, 10]           # 3 × 3 steps, then 2 of polish


def test_a_failed_look_keeps_the_history_and_the_model():
    model, X, y, loss = CASES["mlp"]
    w = Watch(loss, [(X, y)], .1)
    w(model, 0)
    kept, before = w.history, state(model)
    w.loss_fn = lambda out, t: loss(out, t) * math.nan
    with pytest.raises(Exception, match="(?i)nan"): w(model, 1)
    pd.testing.assert_frame_equal(w.history, kept)
    assert same(before, state(model))


def test_an_optimizer_gives_the_weight_decay():
    model, X, y, loss = CASES["mlp"]
    opt = torch.optim.SGD(model.parameters(), lr=.1, weight_decay=.3)
    a, b = Watch(loss, [(X, y)], opt), Watch(loss, [(X, y)], .3)
    a(model, 0); b(model, 0)
    pd.testing.assert_frame_equal(a.history, b.history)


def test_history_survives_a_checkpoint_round_trip():
    model, X, y, loss = CASES["mlp"]
    a, b = (Watch(loss, [(X, y)], .1, similarity=["pearson", "cosine"]) for _ in "ab")
    for k in range(3): a(model, k)
    b.load_state_dict(a.state_dict())
    pd.testing.assert_frame_equal(a.history, b.history)
    a(model, 3); b(model, 3)
    pd.testing.assert_frame_equal(a.history, b.history)


def test_fact_is_one_at_a_critical_point_and_the_history_says_so():
    "One linear layer at the ridge solution, in float64: correlation 1 and residual 0; moved away, neither."
    with seeded(1): X, Y = torch.randn(40, 4).double(), torch.randn(40, 2).double()
    lin = nn.Sequential(nn.Linear(4, 2, bias=False)).double()
    W = torch.linalg.solve(X.T @ X / 40 + .1 * torch.eye(4).double(), X.T @ Y / 40).T
    w = Watch(F.mse_loss, Batches(X, Y, 7), .1)
    for k, M in enumerate((W, W + .3 * W.flip(0))):
        with torch.no_grad(): lin[0].weight.copy_(M)
        w(lin, k)
    at = lambda k, q: w.history.query("epoch == @k and quantity == @q").value.item()
    assert abs(at(0, "FACT") - 1) < 1e-9 and at(0, "residual") < 1e-9
    assert at(1, "FACT") < .999 and at(1, "residual") > .05


def test_the_plot_shows_correlations_when_an_embedding_comes_first():
    "An embedding's first row is a relative error; the figure must still be of correlations, with a legend where there are lines."
    model, X, y, loss = CASES["transformer"]
    w = Watch(loss, [(X, y)], .1, quantities=["fact"])
    w(model, 0)
    assert w.history.similarity.iloc[0] == "relative error"
    fig = w.plot()
    assert fig.axes[0].get_ylabel() == "pearson"
    drawn = [ax for ax in fig.axes if ax.lines]
    at = w.history.query("quantity == 'FACT'").set_index("layer").value
    assert [ax.get_title() for ax in drawn] == [f"layer {n}" for n in at.index] and drawn[0].get_legend() is not None
    assert drawn[0].lines[0].get_ydata()[0] == at.iloc[0]
    plt.close("all")


@pytest.mark.parametrize("kw, error, message", [
    (dict(every=0), ValueError, "every must be a whole number ≥ 1, not 0: it is a period"), (dict(every="x"), TypeError, "a list of the counts"),
    (dict(similarity="euclid"), ValueError, 'similarity must be "pearson" or "cosine"'), (dict(power="half"), TypeError, "power must be a positive number"),
    (dict(prob=3), TypeError, "has no option 'prob': it has accumulate, agop")])
def test_a_wrong_option_is_named_before_training(kw, error, message):
    model, X, y, loss = CASES["mlp"]
    with pytest.raises(error, match=message): Watch(loss, [(X, y)], .1, **kw)


def test_the_optimizer_of_another_model_is_refused():
    model, X, y, loss = CASES["mlp"]
    other = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=.1, weight_decay=.1)
    with pytest.raises(ValueError, match="pass the one made from model.parameters"): Watch(loss, [(X, y)], other)(model, 0)


def test_a_state_of_something_else_is_refused():
    model, X, y, loss = CASES["mlp"]
    w = Watch(loss, [(X, y)], .1); w(model, 0)
    with pytest.raises(ValueError, match="not the state of a Watch with unit='step'"): Watch(loss, [(X, y)], .1, unit="step").load_state_dict(w.state_dict())


def test_one_quantity_may_be_named_without_a_list():
    model, X, y, loss = CASES["mlp"]
    w = Watch(loss, [(X, y)], .1, quantities="fact"); w(model, 0)
    assert "FACT" in set(w.history.quantity) and "eNFA" not in set(w.history.quantity)
