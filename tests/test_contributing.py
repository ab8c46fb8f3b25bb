"""What CONTRIBUTING promises, carried out: an addition touches one place."""
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fact_nb import RFM, RFMRegressor
from fact_nb.linalg import cosine, psd_power, rel_err
from fact_nb.machines.kernels import NAMES, Kernel, check_kernel, register_kernel
from fact_nb.machines.updates import UpdateRule, fact_update
from fact_nb.networks.measure import measure
from fact_nb.networks.quantities import QUANTITIES, Quantity, Side, Source, gram
from fact_nb.networks.quantities import quantities_table, register_quantity
from fact_nb.networks.watch import Watch
from fact_nb.runtime import seeded

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def gcov():
    "The one place: an entry of the registry. Taken out again afterwards."
    with patch.dict(QUANTITIES):
        yield register_quantity(Quantity(
            "gcov", "gradient covariance", "$G^\\top G$", "Gram matrix of the weight's gradient",
            Side.RIGHT, Source.GRADIENT, lambda W, G, lam: gram(G), "gradient covariance"))


@pytest.fixture
def example():
    with seeded(0):
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        X, Y = torch.randn(12, 4).double(), torch.randn(12, 3).double()
    return net, X, Y


def gradient(net, X, Y):
    "G of the first layer, by autograd alone."
    return torch.autograd.grad(F.mse_loss(net(X), Y), net[0].weight)[0]


def test_a_new_quantity_is_measured(gcov, example):
    net, X, Y = example
    G = gradient(net, X, Y)
    batches = [(X[:5], Y[:5]), (X[5:], Y[5:])]
    rep = measure(net, F.mse_loss, batches, .1)
    assert rel_err(G.T @ G, rep["0"].gcov) < 1e-12 and "gcov" in dir(rep["0"])
    alone = measure(net, F.mse_loss, batches, .1, quantities=["gcov"])
    assert torch.equal(alone["0"].gcov, rep["0"].gcov)
    with pytest.raises(ValueError, match="FACT of '0' was not measured: it was not asked for"): alone["0"].fact


def test_a_new_quantity_is_in_tables_and_plots(gcov, example):
    net, X, Y = example
    G, W = gradient(net, X, Y), net[0].weight.detach()
    rep = measure(net, F.mse_loss, [(X, Y)], .1)
    for wide in (False, True):
        value = rep.table("cosine", wide=wide).loc["0", gcov.label]
        assert abs(value - cosine(W.T @ W, G.T @ G)) < 1e-12
    ax = rep.plot("cosine")
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["FACT", "AGOP", "eNFA", gcov.label]
    plt.close("all")


def test_a_new_quantity_is_watched_and_drawn(gcov, example):
    net, X, Y = example
    watch = Watch(F.mse_loss, [(X, Y)], .1)
    watch(net, 0)
    row = watch.history.query("quantity == @gcov.label and layer == '0'")
    assert row.similarity.item() == "pearson"
    lines = {line.get_label(): line for line in watch.plot().axes[0].lines}
    assert lines[gcov.label].get_ydata()[0] == row.value.item()
    plt.close("all")


def test_a_new_quantity_is_in_the_glossary(gcov):
    assert quantities_table().splitlines()[-1] == (
        "| $G^\\top G$ | `rep[\"0\"].gcov` | $d\\times d$ | Gram matrix of the weight's gradient |")


def test_the_glossary_shows_the_registry_of_today():
    "The page is built from stored outputs; a stale one would miss a quantity."
    page = nbformat.read(Path(__file__).parent.parent / "nbs/theory/03_glossary.ipynb", 4)
    shown = [o.data["text/markdown"] for c in page.cells for o in c.get("outputs", []) if "text/markdown" in o.get("data", {})]
    assert "".join(shown) == quantities_table()


def test_a_new_quantity_says_why_it_is_missing(gcov, example):
    net, X, Y = example
    net[0].weight.requires_grad_(False)
    rep = measure(net, F.mse_loss, [(X, Y)], .1)
    with pytest.raises(ValueError, match="gradient covariance of '0' was not measured: the layer is frozen"): rep["0"].gcov
    assert "frozen" in rep.skipped[f"0 ({gcov.family})"]
    free = measure(net, F.mse_loss, [(X, Y)], 0.)                    # it does not divide by λ
    assert free["2"].gcov.norm() > 0 and "residual" not in free.table(wide=True)
    with pytest.raises(ValueError, match="weight_decay is 0"): free["2"].residual


def test_without_the_entry_nothing_of_it_is_left(example):
    net, X, Y = example
    rep = measure(net, F.mse_loss, [(X, Y)], .1)
    assert list(rep.table()) == ["FACT", "r(FACT)", "AGOP^½", "eNFA", "residual"]
    with pytest.raises(AttributeError, match="no attribute 'gcov'"): rep["0"].gcov
    with pytest.raises(ValueError, match="unknown quantities"): measure(net, F.mse_loss, [(X, Y)], .1, quantities=["gcov"])


@dataclass(frozen=True)
class Sharpened(UpdateRule):
    "An update that is not in the library: FACT's next metric, squared and rescaled by its trace."
    strength: float = 2.

    def propose(self, fit):
        return psd_power(fact_update(fit.M, fit.S), self.strength, negative="clip")


def test_a_new_update_is_one_class(tmp_path):
    "It runs in RFM and in the estimators, its settings belong to a checkpoint, and it changes M."
    X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = X[:, 0] * X[:, 1]
    plain, ours = (RFM(update=u, ridge=1e-2).fit(X, y) for u in ("fact", Sharpened()))
    assert (plain.M - ours.M).norm() > .01 * plain.M.norm()
    share = lambda M: float(M.diagonal()[:2].sum() / M.diagonal().sum())
    assert share(ours.M) > share(plain.M)                      # sharper: more on what matters
    assert RFMRegressor(update=Sharpened(), ridge=1e-2).fit(X, y).M_.shape == (4, 4)
    path = tmp_path / "run"
    RFM(update=Sharpened(), ridge=1e-2).fit(X, y, checkpoint=path)
    with pytest.raises(ValueError, match="update"):
        RFM(update=Sharpened(3.), ridge=1e-2).fit(X, y, checkpoint=path)


def test_a_new_kernel_is_one_class(tmp_path):
    "Written once, it is fitted by name, saved and loaded."
    @register_kernel(name="test_rational")
    @dataclass(frozen=True)
    class Rational(Kernel):
        bandwidth: float | None = None

        def k(self, t): return 1 / (1 + t / self.bandwidth**2)
        def dk(self, t): return -self.k(t)**2 / self.bandwidth**2

    try:
        check_kernel(Rational(2.))
        X = np.random.default_rng(0).normal(size=(40, 3))
        m = RFMRegressor(kernel="test_rational").fit(X, X[:, 0]**2)
        m.save(tmp_path / "m.npz")
        again = RFMRegressor.load(tmp_path / "m.npz")
        assert np.allclose(again.predict(X), m.predict(X))
    finally:
        del NAMES["test_rational"]


EXPERIMENT = '''
from dataclasses import dataclass
from fact_nb.lab.experiment import Experiment, Output, judge


@dataclass(frozen=True)
class Config:
    seeds: int = 2


def units(cfg): return [dict(seed=s) for s in range(cfg.seeds)]
def run_unit(cfg, unit, ctx): return Output([dict(value=2 * unit["seed"])])
def judge_new(r): return judge(r.df.value.max() == 2, f"largest value {r.df.value.max()}")


experiment = Experiment("brand_new", "an experiment that a test adds", dict(quick=Config()), units,
                        run_unit, {"brand-new": judge_new})
'''
CLAIM = '''
[[claim]]
id = "brand-new"
where = "past the paper"
section = "A test"
claim = "the largest value is 2"
criterion = "it is 2"
'''


def test_a_new_experiment_and_its_claim_are_two_files(tmp_path):
    "In a copy of the package: listed, run, judged, on the scorecard, and nothing else is touched."
    copy = tmp_path / "fact_nb"
    shutil.copytree(ROOT / "fact_nb", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "experiments" / "brand_new.py").write_text(EXPERIMENT)
    claims = copy / "lab" / "claims.toml"
    claims.write_text(claims.read_text(encoding="utf-8") + CLAIM, encoding="utf-8")
    env = dict(os.environ, PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="1")

    def fact(*words):
        done = subprocess.run([sys.executable, "-m", "fact_nb", *words], cwd=tmp_path, env=env,
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "an experiment that a test adds" in fact("list")
    said = fact("run", "brand_new", "--results", "mine")
    assert "brand-new" in said and "holds" in said and "largest value 2" in said
    rows = {r["id"]: r for r in json.loads(fact("report", "--json", "--results", "mine"))}
    assert rows["brand-new"]["experiment"] == "brand_new"
