"""Deep linear networks: every setting matters, an interrupted unit continues as the same unit, and the numbers are their definitions."""
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fact_nb.runtime import device, seeded
from fact_nb.data.synthetic import deep_linear as task
from fact_nb.experiments import deep_linear as dl
from fact_nb.networks.models import linear_network
from fact_nb.lab.experiment import Context, UsageError, override, replace
from fact_nb.lab.store import plain

TINY = replace(dl.Config(), depths=(3,), d=4, c=2, width=6, n=40, epochs=30, batch=10, polish_steps=20, trace=10)


def rows(cfg, folder, number=0):
    "Rows of one unit, as they would be stored."
    return plain(dl.run_unit(cfg, dl.units(cfg)[number], Context(device("cpu"), folder, progress=False, save_every=0.)).rows)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory): return rows(TINY, tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("change", ["depths=4", "epochs=31", "d=5", "c=3", "width=7", "n=50", "lr=0.004", "lam=0.02", "batch=20", "polish_steps=21", "polish_lr=0.04",
                                    "polish_momentum=0.8", "step=0.005", "trace=5"])
def test_every_setting_changes_the_outcome(change, tiny, tmp_path):
    assert rows(override(TINY, [change]), tmp_path) != tiny


def test_settings_that_choose_the_units(tiny, tmp_path):
    two = override(TINY, ["seeds=2", "long_seeds=1", "long_epochs=40"])
    assert [(u["seed"], u["epochs"]) for u in dl.units(two)] == [(0, 30), (1, 30), (0, 40)]
    assert len({str(rows(two, tmp_path / str(i), i)) for i in range(3)}) == 3
    assert rows(two, tmp_path / "again") == tiny


def test_noise_has_units_of_its_own(tmp_path):
    cfg = override(TINY, ["noise=10,13"])
    assert dl.units(cfg)[1:] == [dict(L=3, seed=0, noise="10-13")]
    got = rows(cfg, tmp_path, 1)
    assert [(r["batch"], r["rest"]) for r in got] == [(10, 0)] * 3 + [(13, 1)] * 3 and len({r["r"] for r in got}) == 6


@pytest.mark.parametrize("at", [1, 57, 119, 121, 700])
def test_an_interrupted_unit_continues_as_the_same_unit(at, tmp_path, monkeypatch):
    monkeypatch.setattr(dl, "CHUNK", 10)
    cfg, calls, update = replace(TINY, polish_steps=1100), [], dl.train.__globals__["_update"]
    whole = rows(cfg, tmp_path / "whole")
    def broken(*a):
        calls.append(1)
        if len(calls) == at: raise KeyboardInterrupt
        return update(*a)
    monkeypatch.setitem(dl.train.__globals__, "_update", broken)
    with pytest.raises(KeyboardInterrupt): rows(cfg, tmp_path / "cut")
    assert [p.name for p in sorted((tmp_path / "cut").glob("*"))] == ([] if at < 40 else ["sgd.pt"] if at < 621 else ["polish.pt", "sgd.pt"])
    monkeypatch.setitem(dl.train.__globals__, "_update", update)
    assert rows(cfg, tmp_path / "cut") == whole


def test_rows_are_their_definitions(tiny):
    "FACT and AGOP before training by a loop over samples that knows nothing of the library."
    D = task(TINY.n, TINY.d, TINY.c)
    with seeded(0): net = linear_network(TINY.d, TINY.c, TINY.width, 3).double()
    with seeded(0): net.load_state_dict(linear_network(TINY.d, TINY.c, TINY.width, 3).state_dict())
    for l in range(3):
        W, fact, agop = net[l].weight.detach(), 0., 0.
        for x, y in zip(D.X, D.Y):
            h = x
            for m in net[:l]: h = m.weight @ h
            h = h.detach().requires_grad_(); out = h
            for m in net[l:]: out = m.weight @ out
            g = torch.autograd.grad((out - y).square().mean(), h, retain_graph=True)[0]
            J = torch.stack([torch.autograd.grad(o, h, retain_graph=True)[0] for o in out])
            fact, agop = fact - torch.outer(g, h.detach()) / (TINY.n * TINY.lam), agop + J.T @ J / TINY.n
        cos = lambda A: float((A * (W.T @ W)).sum() / A.norm() / (W.T @ W).norm())
        row = next(r for r in tiny if r["part"] == "layer" and r["phase"] == "init" and r["layer"] == l + 1)
        assert np.isclose(row["fact"], cos(fact), atol=1e-9) and np.isclose(row["agop"], cos(agop), atol=1e-9)
        assert np.isclose(row["r"], float((W.T @ W - fact).norm() / (W.T @ W).norm()), rtol=1e-9)


def test_linear_networks_have_mirrored_neighbours():
    "bFACT_l = FACT_{l+1}ᵀ at any weights."
    D = task(30, 4, 2)
    with seeded(3): net = linear_network(4, 2, 6, 4).double()
    rep = dl.measure(net, F.mse_loss, [(D.X, D.Y)], 1e-2)
    for l in range(3): assert torch.allclose(rep[str(l)].bfact, rep[str(l + 1)].fact.T, atol=1e-10)


def test_too_much_decay_collapses_and_does_not_count(tmp_path):
    cfg = replace(TINY, depths=(4,), lam=2., epochs=60)
    got = [r for r in rows(cfg, tmp_path) if r["part"] == "network" and r["phase"] == "polish"]
    assert got[0]["rank"] < 2


def test_divergence_is_said_in_a_sentence(tmp_path):
    with pytest.raises(FloatingPointError, match="lower the learning rate"): rows(replace(TINY, polish_lr=50.), tmp_path)


@pytest.mark.parametrize("bad", ["lam=-1", "depths=0", "width=1", "step=0", "batch=0"])
def test_bad_settings_are_refused(bad):
    with pytest.raises(UsageError): override(dl.Config(), [bad])


def test_figures_draw_from_a_small_result(tmp_path):
    import matplotlib.pyplot as plt
    r = dl.experiment.run("quick", overrides=["depths=2,3", "width=6", "n=60", "d=4", "c=2", "polish_steps=300"], results=tmp_path, progress=False, device="cpu")
    for f in dl.figures.values(): plt.close(f.draw(r))
    assert all(j(r) is None for j in dl.judges.values())
