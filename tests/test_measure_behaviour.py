"""Options, faults, restoration, properties and processes of `measure`."""
import copy
import os
import random
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fact_nb.linalg import cosine, rel_asymmetry, rel_err
from fact_nb.runtime import seeded
from fact_nb.networks.critical_points import train_to_critical
from fact_nb.networks.measure import measure

ce, mse = F.cross_entropy, F.mse_loss
QS = ("fact", "bfact", "agop", "bagop", "enfa", "benfa")


def data(n=12, d=4, c=3, seed=0):
    with seeded(seed): return torch.randn(n, d).double(), torch.randint(c, (n,))


def batches(X, Y, size=5):
    return [(X[i:i + size], Y[i:i + size]) for i in range(0, len(X), size)]


def mlp(*dims, bias=False, act=nn.ReLU, seed=0):
    with seeded(seed):
        mods = [m for a, b in zip(dims, dims[1:]) for m in (nn.Linear(a, b, bias=bias), act())][:-1]
        return nn.Sequential(*mods).double()


def same(r, s, tol=1e-12, qs=QS):
    assert r.layers == s.layers
    for k in r.layers:
        for q in qs: assert rel_err(getattr(r[k], q), getattr(s[k], q)) < tol, (k, q)


# ---------------------------------------------------------------- the theorem, and what would break it

@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_fact_holds_at_a_critical_point(loss):
    X, Y = data(30, 4, 3)
    if loss == "mse": Y = torch.stack([torch.sin(X[:, 0]), X[:, 1] * X[:, 2]], 1)
    m = mlp(4, 6, 5, 2 if loss == "mse" else 3, bias=True, act=nn.Tanh)
    fn = mse if loss == "mse" else ce
    train_to_critical(m, fn, X, Y, 1e-3, iters=3000)
    rep = measure(m, fn, batches(X, Y, 7), 1e-3)
    for k in rep.layers:
        lay = rep[k]
        assert lay.nfm.norm() > 1e-3                                # not the trivial critical point
        assert rel_err(lay.nfm, lay.fact) < 1e-6 and rel_err(lay.bnfm, lay.bfact) < 1e-6
        assert lay.residual < 1e-6 and rel_asymmetry(lay.fact) < 1e-6
    hidden = rep["2"]                                                # swapped for AGOP, eNFA or noise the same assertion fails
    for wrong in (hidden.agop, hidden.enfa, torch.randn_like(hidden.nfm), hidden.fact * 1.01):
        assert not rel_err(hidden.nfm, wrong) < 1e-6
    assert cosine(hidden.nfm, hidden.agop) < .9999
    t = rep.table(wide=True)
    assert (t["r(FACT)"] < 1e-6).all() and (t["FACT"] > 1 - 1e-9).all() and (t["√(FACT·FACTᵀ)"] > 1 - 1e-9).all()
    wrong = measure(m, fn, batches(X, Y, 7), 2e-3)                   # the wrong λ is noticed
    assert wrong["2"].residual > .4


@pytest.mark.parametrize("seed", range(3))
def test_free_identities_of_bias_free_relu_nets(seed):
    X, Y = data(20, 5, 3, seed)
    rep = measure(mlp(5, 7, 6, 3, seed=seed), ce, batches(X, Y), .1)
    facts, bfacts = [rep[k].fact for k in rep.layers], [rep[k].bfact for k in rep.layers]
    for A in facts[1:]: assert abs(A.trace() - facts[0].trace()) < 1e-10 * facts[0].norm()
    for b, f in zip(bfacts, facts[1:]): assert torch.allclose(b.diag(), f.diag(), atol=1e-12)
    for f, b in zip(facts, bfacts):
        k = min(len(f), len(b))
        e, eb = (torch.linalg.eigvals(A).abs().sort(descending=True).values[:k] for A in (f, b))
        assert torch.allclose(e, eb, atol=1e-8)
    assert rel_asymmetry(facts[1]) > .1                             # away from convergence


def test_linear_nets_pass_fact_on():
    X, Y = data(20, 5, 3)
    m = mlp(5, 6, 4, 3, act=nn.Identity)
    rep = measure(m, ce, batches(X, Y), .1)
    names = rep.layers
    for a, b in zip(names, names[1:]): assert rel_err(rep[a].bfact, rep[b].fact.T) < 1e-10


def test_last_layer_agop_is_trivial():
    X, Y = data()
    rep = measure(mlp(4, 5, 3), ce, batches(X, Y), .1)
    assert rel_err(rep["2"].nfm, rep["2"].agop) < 1e-12 and rel_err(torch.eye(3).double(), rep["2"].bagop) < 1e-12


# ---------------------------------------------------------------- options

def test_unequal_batches_equal_one_batch():
    X, Y = data()
    m = mlp(4, 5, 3)
    same(measure(m, ce, [(X, Y)], .1), measure(m, ce, batches(X, Y, 5), .1))
    same(measure(m, ce, [(X, Y)], .1), measure(m, ce, [(X[:1], Y[:1]), (X[1:], Y[1:])], .1))


def test_quantities_cost_only_what_they_need(monkeypatch):
    X, Y = data()
    m, passes = mlp(4, 5, 3), []
    real = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda out, inp, *a, **k: passes.append(len(inp)) or real(out, inp, *a, **k))
    seen = []
    loader = (seen.append(1) or b for b in batches(X, Y, 6))
    rep = measure(m, ce, loader, .1, quantities=["nfm", "bnfm"])
    assert passes == [] and len(seen) == 1 and rel_err(m[0].weight.T @ m[0].weight, rep["0"].nfm) < 1e-12
    measure(m, ce, batches(X, Y, 6), .1, quantities=["fact"])
    assert passes == [2, 2]                                          # one backward pass a batch, for two weights
    passes.clear()
    rep = measure(m, ce, batches(X, Y, 6), .1, quantities=["enfa"])
    assert passes == [2, 2] + [2, 2]                                 # and two on the first batch: do samples interact?
    with pytest.raises(ValueError, match="not asked for"): rep["0"].fact
    with pytest.raises(ValueError, match="not asked for"): rep["0"].benfa
    passes.clear()
    measure(m, ce, batches(X, Y, 6), .1, quantities=["agop", "fact"])
    assert len(passes) == 2 + 2 * (1 + 3)                            # and one for each of three outputs


def test_one_side_equals_both_sides():
    X, Y = data()
    m = mlp(4, 9, 3)                                                  # tall and wide layers take different branches
    full = measure(m, ce, batches(X, Y), .1)
    for q in QS:
        rep = measure(m, ce, batches(X, Y), .1, quantities=[q])
        for k in rep.layers: assert rel_err(getattr(full[k], q), getattr(rep[k], q)) < 1e-12


def test_max_dim_lists_and_does_not_form():
    X, Y = data()
    m = mlp(4, 9, 3)
    full, rep = measure(m, ce, batches(X, Y), .1), measure(m, ce, batches(X, Y), .1, max_dim=5)
    assert set(rep.skipped) == {"0 (output side)", "2 (input side)"} and "9 × 9" in rep.skipped["2 (input side)"]
    for q in ("bfact", "bnfm", "bagop", "benfa"):
        with pytest.raises(ValueError, match="max_dim=5"): getattr(rep["0"], q)
    for q in ("fact", "nfm", "agop", "enfa"): assert rel_err(getattr(full["0"], q), getattr(rep["0"], q)) < 1e-12
    assert abs(rep["2"].residual - full["2"].residual) < 1e-10       # a number exists on whichever side is small
    assert np.isnan(rep.table(wide=True).loc["0", "bFACT"])


def test_forward_and_weight_for_token_losses():
    with seeded(1):
        m = nn.Sequential(nn.Embedding(6, 4), nn.Tanh(), nn.Linear(4, 6, bias=False)).double()
        X = torch.randint(6, (7, 5))
        Y = torch.randint(6, (7, 5))
        Y[torch.rand(7, 5) < .4] = -100                               # tokens that do not count
    loss = lambda f, y: ce(f.flatten(0, 1), y.flatten(), ignore_index=-100)
    tokens = lambda f, y: int((y != -100).sum())
    dicts = [dict(ids=x, labels=y) for x, y in batches(X, Y, 3)]
    fwd = lambda b: (m(b["ids"]), b["labels"])
    whole = measure(m, loss, [(X, Y)], .1)
    rep = measure(m, loss, dicts, .1, forward=fwd, weight=tokens)
    for k in rep.layers:
        for q in ("bfact", "bagop", "benfa"): assert rel_err(getattr(whole[k], q), getattr(rep[k], q)) < 1e-10, (k, q)
    found = measure(m, loss, dicts, .1, forward=fwd)                  # what the loss averages over is found out
    for q in QS: assert rel_err(getattr(rep["2"], q), getattr(found["2"], q)) < 1e-12
    naive = measure(m, loss, dicts, .1, forward=fwd, weight=lambda f, y: len(y))
    assert rel_err(whole["2"].fact, naive["2"].fact) > 1e-3           # weighting by samples is another objective
    scaled = measure(m, loss, dicts, .1, forward=fwd, weight=lambda f, y: 7.5 * tokens(f, y))
    for q in QS: assert rel_err(getattr(rep["2"], q), getattr(scaled["2"], q)) < 1e-12   # only ratios matter
    with pytest.raises(ValueError, match="pass forward="): measure(m, loss, dicts, .1)
    with pytest.raises(ValueError, match="weight= returns .batch 0. must be a number ≥ 0, not -1"): measure(m, loss, dicts, .1, forward=fwd, weight=lambda f, y: -1)
    with pytest.raises(ValueError, match="pair"): measure(m, loss, dicts, .1, forward=lambda b: m(b["ids"]))


def test_sketch_is_unbiased_and_knows_its_error():
    with seeded(2):
        m = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 8)).double()
        X, Y = torch.randn(10, 4).double(), torch.randn(10, 8).double()
    exact = measure(m, mse, [(X, Y)], .1)["0"]
    many = [measure(m, mse, [(X, Y)], .1, agop="sketch", probes=8, seed=s, quantities=["agop", "bagop"])["0"] for s in range(60)]
    for q in ("agop", "bagop"):
        A, mats = getattr(exact, q), torch.stack([getattr(r, q) for r in many])
        errs = (mats - A).flatten(1).norm(dim=1) / A.norm()
        told = torch.tensor([r.stderr[q] for r in many])
        assert rel_err(A, mats.mean(0)) < 3 * errs.square().mean().sqrt() / 60 ** .5      # unbiased
        ratio = told.square().mean().sqrt() / errs.square().mean().sqrt()
        assert .8 < ratio < 1.25, (q, ratio)                                             # the standard error is honest
    big = measure(m, mse, [(X, Y)], .1, agop="sketch", probes=512)["0"]
    assert rel_err(exact.agop, big.agop) < .1 and big.stderr["agop"] < .1
    assert np.isnan(measure(m, mse, [(X, Y)], .1, agop="sketch", probes=1)["0"].stderr["agop"])
    assert exact.stderr == {}


def test_accumulate_in_double():
    with seeded(3):
        m, X = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(4000, 8)
        Y = torch.randn(4000, 4)
    L = batches(X, Y, 10)
    a, b = measure(m, mse, L, .1, quantities=["benfa"]), measure(m, mse, L, .1, quantities=["benfa"], accumulate=torch.float64)
    ref = measure(copy.deepcopy(m).double(), mse, L, .1, quantities=["benfa"])
    assert a["0"].benfa.dtype == torch.float32 and b["0"].benfa.dtype == torch.float64
    assert rel_err(ref["0"].benfa, b["0"].benfa) < rel_err(ref["0"].benfa, a["0"].benfa)


def test_half_precision_sums_in_float32():
    with seeded(3):
        m, X, Y = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(40, 8), torch.randn(40, 4)
    ref = measure(m, mse, batches(X, Y), .1)
    rep = measure(copy.deepcopy(m).bfloat16(), mse, batches(X, Y), .1)
    assert rep["0"].fact.dtype == torch.float32 and rel_err(ref["0"].fact, rep["0"].fact) < .05


@pytest.mark.parametrize("by", ["number", "mapping", "module", "optimizer"])
def test_weight_decay_forms(by):
    X, Y = data()
    m = mlp(4, 5, 3)
    wd = dict(number=.1, mapping={"0": .1, "2": .1}, module={"0": .1, "2": .1}, optimizer=torch.optim.SGD(m.parameters(), lr=1., weight_decay=.1))[by]
    same(measure(m, ce, batches(X, Y), .1), measure(m, ce, batches(X, Y), wd))


def test_weight_decay_per_group_and_per_projection():
    X, Y = data()
    m = mlp(4, 5, 3)
    opt = torch.optim.SGD([dict(params=m[0].parameters(), weight_decay=.2), dict(params=m[2].parameters())], lr=1.)
    rep, ref = measure(m, ce, batches(X, Y), opt), measure(m, ce, batches(X, Y), .1)
    assert rel_err(ref["0"].fact, 2 * rep["0"].fact) < 1e-12
    with pytest.raises(ValueError, match="weight_decay is 0"): rep["2"].fact
    assert "weight_decay is 0" in rep.skipped["2 (FACT)"] and rep["2"].agop.norm() > 0
    with seeded(0): att = nn.MultiheadAttention(4, 2, batch_first=True).double()
    S = torch.randn(3, 5, 4).double()
    fwd = lambda b: (att(b, b, b)[0], b)
    rep = measure(att, mse, [S], {"v": .1}, forward=fwd)
    assert rel_err(measure(att, mse, [S], .1, forward=fwd)["v"].fact, rep["v"].fact) < 1e-12
    with pytest.raises(ValueError, match="weight_decay is 0"): rep["q"].fact


def test_zero_weight_decay():
    X, Y = data()
    m = mlp(4, 5, 3)
    rep, ref = measure(m, ce, batches(X, Y), 0.), measure(m, ce, batches(X, Y), .1)
    same(ref, rep, qs=QS[2:])
    for q in ("fact", "bfact", "residual"):
        with pytest.raises(ValueError, match="weight_decay is 0"): getattr(rep["0"], q)
    assert rep.table(wide=True)["AGOP"].notna().all() and "FACT" not in rep.table(wide=True)
    with pytest.raises(ValueError, match="weight_decay 0"): measure(m, ce, batches(X, Y), 0., quantities=["fact"])


def test_adamw_is_warned_about():
    X, Y = data()
    m = mlp(4, 5, 3)
    with pytest.warns(UserWarning, match="preconditioner"): measure(m, ce, batches(X, Y), torch.optim.AdamW(m.parameters(), weight_decay=.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(m, ce, batches(X, Y), torch.optim.Adam(m.parameters(), weight_decay=.1))


# ---------------------------------------------------------------- dropout and batch-norm

class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x): return self.b(F.dropout(torch.relu(self.a(x)), .5, self.training))


@pytest.mark.parametrize("functional", [False, True])
def test_dropout_is_averaged_over_masks(functional):
    X, Y = data(16)
    with seeded(4): m = (Functional() if functional else nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(.5), nn.Linear(8, 3))).double()
    a = "a" if functional else "0"
    run = lambda **kw: measure(m, ce, [(X, Y)], .1, quantities=["fact"], **kw)
    with pytest.warns(UserWarning, match="dropout"): ev = run()
    with pytest.warns(UserWarning, match="averaged"): one, few, many, other = (run(mode="train", masks=k, seed=s) for k, s in ((1, 5), (8, 5), (400, 5), (400, 6)))
    assert (one.n, few.n) == (16, 128)
    gap = lambda r, s: rel_err(r[a].fact, s[a].fact)
    assert gap(many, other) < .5 * gap(many, one) and gap(many, ev) > gap(many, other)   # converges, to something else than eval
    with pytest.warns(UserWarning): again = run(mode="train", masks=8, seed=5)
    same(few, again, qs=["fact"])
    m.eval()
    with pytest.warns(UserWarning): keep = run(mode="keep")
    same(ev, keep, qs=["fact"])


def test_dropout_critical_point_is_seen_only_in_train_mode():
    """A linear model with input dropout: its averaged objective is known, and the eval objective is another one."""
    with seeded(5):
        X, Y = torch.randn(200, 4).double(), torch.randn(200, 2).double()
        Y = Y + X[:, :2]
    lam, p = .05, .5
    A = X.T @ X / 200                                                # E‖W(x∘m)/(1−p) − y‖² = ‖Wx − y‖² + p/(1−p) Σ W² x²
    H = A + p / (1 - p) * torch.diag(A.diag())
    W = torch.linalg.solve(H + lam / 2 * torch.eye(4).double(), X.T @ Y / 200).T
    m = nn.Sequential(nn.Dropout(p), nn.Linear(4, 2, bias=False)).double()
    with torch.no_grad(): m[1].weight.copy_(W)
    loss = lambda f, y: (f - y).square().sum(1).mean()
    with pytest.warns(UserWarning, match="dropout"):
        train, ev = (measure(m, loss, [(X, Y)], lam, mode=k, masks=3000, quantities=["nfm", "fact"])["1"].residual for k in ("train", "eval"))
    assert train < .25 < .77 < ev, (train, ev)


def test_batch_norm_is_flagged_and_its_trace_vanishes():
    X, Y = data(16)
    with seeded(6): m = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6, eps=1e-14), nn.ReLU(), nn.Linear(6, 3)).double()
    before = copy.deepcopy(m.state_dict())
    with pytest.warns(UserWarning, match="scale invariant"): rep = measure(m, ce, [(X, Y)], .1, mode="train")
    assert rep["0"].scale_invariant and not rep["3"].scale_invariant
    assert abs(rep["0"].fact.trace()) < 1e-10 * rep["0"].fact.norm() and rep["0"].bfact.diag().abs().max() < 1e-10 * rep["0"].bfact.norm()
    assert all(torch.equal(v, before[k]) for k, v in m.state_dict().items())          # running statistics restored
    with pytest.warns(UserWarning, match="batch-norm"): ev = measure(m, ce, [(X, Y)], .1)
    assert abs(ev["0"].fact.trace()) > 1e-3 * ev["0"].fact.norm()                     # the mode matters
    with seeded(7): c = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    with pytest.warns(UserWarning): assert measure(c, ce, [(torch.randn(4, 1, 4, 4), torch.arange(4) % 3)], .1)["0"].scale_invariant


# ---------------------------------------------------------------- nothing is left behind

def snapshot(m):
    hooks = sum(len(x._forward_hooks) + len(x._forward_pre_hooks) + len(x._backward_hooks) for x in m.modules())
    return dict(state={k: v.clone() for k, v in m.state_dict().items()}, grads={k: (None if p.grad is None else p.grad.clone()) for k, p in m.named_parameters()},
                ids={k: id(p.grad) for k, p in m.named_parameters()}, modes=[x.training for x in m.modules()], hooks=hooks,
                req=[p.requires_grad for p in m.parameters()], rng=torch.get_rng_state(), np=np.random.get_state()[1].copy(), py=random.getstate(),
                versions=[p._version for p in m.parameters()], buffers=[(id(b)) for b in m.buffers()])


def equal(a, b):
    eq = lambda x, y: (x is None and y is None) or torch.equal(x, y)
    assert all(eq(v, b["state"][k]) for k, v in a["state"].items()) and all(eq(v, b["grads"][k]) for k, v in a["grads"].items())
    for k in ("ids", "modes", "hooks", "req", "py", "versions", "buffers"): assert a[k] == b[k], k
    assert torch.equal(a["rng"], b["rng"]) and (a["np"] == b["np"]).all()


def busy_model():
    with seeded(8):
        m = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(.2), nn.ReLU(), nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)).double()
    m[5].weight = m[4].weight                                        # tied: naming hooks are used
    m[0].weight.requires_grad_(False)
    m[1].eval()                                                       # modes differ inside the model
    m[6].weight.grad = torch.ones_like(m[6].weight)
    return m


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["eval", "train", "keep"])
def test_model_is_left_as_found(mode):
    X, Y = data(16)
    m = busy_model()
    before = snapshot(m)
    measure(m, ce, batches(X, Y, 8), .1, mode=mode, agop="sketch")
    equal(before, snapshot(m))


def explode(f, y): raise RuntimeError("boom")


FAULTS = {
    "nan loss": (lambda m, X, Y: measure(m, lambda f, y: ce(f, y) * float("nan"), batches(X, Y), .1), ValueError, "loss is nan on batch 0"),
    "inf later": (lambda m, X, Y: measure(m, ce, [(X, Y), (X * float("inf"), Y)], .1), ValueError, "on batch 1"),
    "empty": (lambda m, X, Y: measure(m, ce, [], .1), ValueError, "no samples"),
    "vector loss": (lambda m, X, Y: measure(m, lambda f, y: ce(f, y, reduction="none"), batches(X, Y), .1), ValueError, "one number"),
    "sum loss": (lambda m, X, Y: measure(m, nn.CrossEntropyLoss(reduction="sum"), batches(X, Y), .1), ValueError, "reduction='mean'"),
    "not a tensor": (lambda m, X, Y: measure(m, lambda f, y: 1., batches(X, Y), .1), TypeError, "must return a tensor"),
    "detached": (lambda m, X, Y: measure(m, lambda f, y: ce(f.detach(), y), batches(X, Y), .1), ValueError, "does not depend on any weight"),
    "loss fails": (lambda m, X, Y: measure(m, explode, batches(X, Y), .1), RuntimeError, "boom"),
    "bad batch": (lambda m, X, Y: measure(m, ce, [X], .1), ValueError, "pass forward="),
    "no loader": (lambda m, X, Y: measure(m, ce, 3, .1), TypeError, "must yield batches"),
    "device": (lambda m, X, Y: measure(m, lambda f, y: ce(f, y, weight=torch.ones(3, device="meta")), batches(X, Y), .1), ValueError, "different devices"),
    "quantity": (lambda m, X, Y: measure(m, ce, batches(X, Y), .1, quantities=["ntk"]), ValueError, "unknown quantities"),
    "no quantity": (lambda m, X, Y: measure(m, ce, batches(X, Y), .1, quantities=[]), ValueError, "empty"),
    "mode": (lambda m, X, Y: measure(m, ce, batches(X, Y), .1, mode="test"), ValueError, "mode must be one of"),
    "agop": (lambda m, X, Y: measure(m, ce, batches(X, Y), .1, agop="fast"), ValueError, "agop must be one of"),
    "probes": (lambda m, X, Y: measure(m, ce, batches(X, Y), .1, probes=0), ValueError, "probes must be a whole number ≥ 1, not 0"),
    "decay": (lambda m, X, Y: measure(m, ce, batches(X, Y), -1.), ValueError, "weight_decay must be a number ≥ 0, not -1.0"),
    "decay true": (lambda m, X, Y: measure(m, ce, batches(X, Y), True), TypeError, "not True: pass the λ of training"),
    "decay text": (lambda m, X, Y: measure(m, ce, batches(X, Y), "1e-4"), TypeError, "weight_decay must be a number"),
    "other optimizer": (lambda m, X, Y: measure(m, ce, batches(X, Y), torch.optim.SGD(copy.deepcopy(m).parameters(), lr=.1, weight_decay=.1)), ValueError,
                        "pass the one made from model.parameters"),
    "no weight": (lambda m, X, Y: measure(m, ce, batches(X, Y), .1, weight=lambda f, y: 0), ValueError, "weight= returned 0 on every batch.*leave weight= out"),
    "weight of nothing": (lambda m, X, Y: measure(m, ce, batches(X, Y), .1, weight=lambda f, y: None), TypeError, "return what loss_fn averaged over"),
    "weight": (lambda m, X, Y: measure(m, ce, batches(X, Y), .1, weight=3), TypeError, "weight must be a function or None"),
    "half a probe": (lambda m, X, Y: measure(m, ce, batches(X, Y), .1, probes=1.5), ValueError, "probes must be a whole number"),
    "accumulate": (lambda m, X, Y: measure(m, ce, batches(X, Y), .1, accumulate="float64"), TypeError, "such as torch.float64"),
    "a quantity": (lambda m, X, Y: measure(m, ce, batches(X, Y), .1, quantities=3), TypeError, "quantities must be a list of names"),
    "decay name": (lambda m, X, Y: measure(m, ce, batches(X, Y), {"fc": .1}), ValueError, "does not have"),
    "nan gradient": (lambda m, X, Y: measure(m, lambda f, y: (f * 0).abs().pow(.5).sum() + ce(f, y), batches(X, Y), .1), ValueError, "nan or inf although"),
    "loader fails": (lambda m, X, Y: measure(m, ce, iter_then_fail(X, Y), .1), OSError, "disk"),
}


def iter_then_fail(X, Y):
    yield X, Y
    raise OSError("disk")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_give_one_clear_line_and_leave_the_model_alone(fault):
    call, kind, text = FAULTS[fault]
    X, Y = data(16)
    m = busy_model()
    before = snapshot(m)
    with pytest.raises(kind, match=text): call(m, X, Y)
    equal(before, snapshot(m))


def test_models_without_matrices():
    for m in (nn.ReLU(), nn.BatchNorm1d(3)):
        with pytest.raises(ValueError, match="no weight matrix"): measure(m, ce, [], .1)
    with pytest.raises(ValueError, match="meta device"): measure(nn.Linear(2, 2, device="meta"), mse, [], .1)
    with pytest.raises(TypeError, match="torch.nn.Module"): measure(lambda x: x, mse, [], .1)
    half = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="meta device"): measure(half, mse, [], .1)


def test_pending_graph_survives():
    X, Y = data(16)
    with seeded(9): m = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().eval()
    L = ce(m(X), Y)
    with pytest.warns(UserWarning): measure(m, ce, batches(X, Y), .1)
    L.backward()                                                      # nothing it saved was written to


def test_random_state_of_the_loader_is_restored():
    X, Y = data(16)
    g = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 4, shuffle=True, generator=g)
    state = g.get_state()
    same(measure(mlp(4, 5, 3), ce, [(X, Y)], .1), measure(mlp(4, 5, 3), ce, loader, .1))
    assert torch.equal(state, g.get_state())


def test_under_no_grad_and_inside_training():
    X, Y = data(16)
    m = mlp(4, 5, 3)
    ref = measure(m, ce, batches(X, Y), .1)
    with torch.no_grad(): same(ref, measure(m, ce, batches(X, Y), .1))
    m(X).sum().backward()
    assert m[0].weight.grad is not None


def test_wrapped_and_compiled_models():
    X, Y = data(16)
    m = mlp(4, 5, 3)
    ref = measure(m, ce, batches(X, Y), .1)
    same(ref, measure(torch.compile(m), ce, batches(X, Y), .1))
    same(ref, measure(nn.DataParallel(m), ce, batches(X, Y), .1))


def test_checkpointed_blocks():
    from torch.utils.checkpoint import checkpoint
    X, Y = data(16)
    m = mlp(4, 5, 6, 3)
    fwd = lambda b: (m[3:](checkpoint(m[:3], b[0], use_reentrant=False)), b[1])
    same(measure(m, ce, batches(X, Y), .1), measure(m, ce, batches(X, Y), .1, forward=fwd))


# ---------------------------------------------------------------- what is listed

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle, self.dead, self.side = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.rnn, self.bare = nn.GRU(4, 4, batch_first=True), nn.Parameter(torch.eye(4))
        self.quiet = nn.Linear(4, 3)

    def forward(self, x):
        with torch.no_grad(): x = x + self.side(x)
        self.dead(x)
        h = self.rnn(self.used(x)[:, None])[0][:, 0] @ self.bare
        return self.quiet(h)


def test_nothing_is_skipped_silently():
    X, Y = data(16)
    with seeded(10): m = Odd().double()
    rep = measure(m, ce, batches(X, Y), .1)
    assert rep.layers == ["dead", "used", "bare", "quiet", "rnn.weight_ih_l0", "rnn.weight_hh_l0"]
    for k, why in {"idle": "never seen", "side": "no_grad", "dead (FACT)": "does not depend"}.items():
        assert why in rep.skipped[k], (k, rep.skipped)
    with pytest.raises(ValueError, match="not seen from outside .GRU."): rep["rnn.weight_ih_l0"].agop
    with pytest.raises(ValueError, match="loss does not depend"): rep["dead"].enfa
    with pytest.raises(ValueError, match="output does not depend"): rep["dead"].agop
    with pytest.raises(ValueError, match="loss does not depend"): rep["dead"].fact
    with pytest.raises(KeyError, match="never seen"): rep["idle"]
    every = {n.rsplit(".", 1)[0] if n.endswith("weight") else n for n, p in m.named_parameters() if p.ndim > 1}
    assert every <= set(rep.layers) | set(rep.skipped)


def test_frozen_model():
    X, Y = data(16)
    m = mlp(4, 5, 3)
    ref = measure(m, ce, batches(X, Y), .1)
    rep = measure(m.requires_grad_(False), ce, batches(X, Y), .1)
    same(ref, rep, qs=QS[2:])
    assert rep["0"].frozen and "frozen" in rep.skipped["0 (FACT)"]
    half = mlp(4, 5, 3)
    half[0].weight.requires_grad_(False)
    rep = measure(half, ce, batches(X, Y), .1)
    assert rel_err(ref["2"].fact, rep["2"].fact) < 1e-12 and rel_err(ref["0"].agop, rep["0"].agop) < 1e-12


def test_wide_exact_agop_is_warned_about():
    with seeded(0): m = nn.Linear(3, 300)
    with pytest.warns(UserWarning, match="sketch"): measure(m, mse, [(torch.randn(2, 3), torch.randn(2, 300))], .1)


# ---------------------------------------------------------------- several processes

WORKER = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from fact_nb.networks.measure import measure
rank, port, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
torch.manual_seed(0)
m = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double()
m[4].weight = m[2].weight
X, Y = torch.randn(13, 4).double(), torch.randint(3, (13,))
ce = nn.functional.cross_entropy
whole = [(X[:5], Y[:5]), (X[5:8], Y[5:8]), (X[8:], Y[8:])]
one = measure(m, ce, whole, .1, distributed=False)
def run(shards):
    try: rep = measure(nn.parallel.DistributedDataParallel(m), ce, shards[rank], .1)
    except Exception as e: return f"{type(e).__name__}: {e}"
    assert rep.layers == one.layers == ["0", "2", "6"] and rep.n == 13 and abs(rep.loss - one.loss) < 1e-12, rep
    pairs = [(getattr(rep[k], q), getattr(one[k], q)) for k in rep.layers for q in ("fact", "bfact")]
    pairs += [(getattr(rep[k].uses[u], q), getattr(one[k].uses[u], q)) for k in rep.layers for u in one[k].uses for q in ("agop", "bagop", "enfa", "benfa")]
    worst = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return f"ok {len(pairs)} {worst:.1e}" if worst < 1e-12 else f"differs {worst}"
cases = [[whole[:2], whole[2:]], [whole, []], [whole, [(X * float("nan"), Y)]], [[], []]]
open(out, "w").write(chr(10).join(run(c) for c in cases))
dist.barrier()
os._exit(0)          # gloo's threads now and then abort when the interpreter takes them down
"""

EXPECTED = [["ok 22", "ok 22", "RuntimeError: measuring failed in process 1: ValueError: the loss is nan", "ValueError: the loader yielded no samples"],
            ["ok 22", "ok 22", "ValueError: the loss is nan", "ValueError: the loader yielded no samples"]]


def free_port():
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def test_two_processes(tmp_path):
    """Uneven shards, an empty shard, a process that fails, and no data at all; the first two equal the single-process result."""
    port, script = free_port(), tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [subprocess.Popen([sys.executable, str(script), str(r), port, str(tmp_path / str(r))], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for r in (0, 1)]
    try: errs = [p.communicate(timeout=180)[1].decode() for p in runs]
    finally:
        for p in runs: p.kill()
    assert [p.returncode for p in runs] == [0, 0], errs
    for r in (0, 1):
        got = (tmp_path / str(r)).read_text().splitlines()
        assert len(got) == 4 and all(g.startswith(e) for g, e in zip(got, EXPECTED[r])), got


def test_a_batch_may_weigh_nothing():
    X, Y = data(16)
    m = mlp(4, 5, 3)
    half = measure(m, ce, batches(X, Y, 8), .1, weight=lambda f, y: len(y) * float(y is not None and torch.equal(y, Y[:8])))
    assert rel_err(measure(m, ce, batches(X[:8], Y[:8], 8), .1)["0"].fact, half["0"].fact) < 1e-12


def test_the_default_table_fits_a_terminal():
    X, Y = data()
    rep = measure(mlp(4, 9, 7, 3), ce, batches(X, Y), .1)
    few, wide = rep.table(), rep.table(wide=True)
    assert list(few) == ["FACT", "r(FACT)", "AGOP^½", "eNFA", "residual"] and few.equals(wide[list(few)])
    assert max(map(len, few.to_string().splitlines())) <= 80 < max(map(len, wide.to_string().splitlines()))
    assert "AGOP" in rep.table(symmetrise=False) and "AGOP^¼" in rep.table(power=.25)
    back = measure(mlp(4, 9, 7, 3), ce, batches(X, Y), .1, quantities=["bnfm", "bfact", "bagop"]).table()
    assert list(back) == ["bFACT", "r(bFACT)", "bAGOP^½", "residual"]          # the other side where nothing else was measured
