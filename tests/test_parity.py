"Sparse parities and the phase transition: faults, swaps and bad results."
import signal as sig
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from fact_nb.experiments import parity, phase_transition
from fact_nb.lab.experiment import Context, UsageError, override
from fact_nb.lab.workers import run_experiment as run
from fact_nb.lab.parities import follow
from fact_nb.machines.rfm import RFM
from fact_nb.machines.kernels import Gaussian
from fact_nb.data.synthetic import Parity, sparse_parity

SMALL = replace(parity.presets["quick"], d=14, n_test=200, ks=(1, 2, 3), ns=(80, 100, 400), seeds=1, ridges=(1e-6, 1e-2), later=3, need_ns=(350,), need_iters=5)


def context(folder): return Context(torch.device("cpu"), folder, progress=False)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    exp = replace(parity.experiment, presets=dict(quick=SMALL))
    return run(exp, "quick", results=tmp_path_factory.mktemp("results"), progress=False, device="cpu")


def test_presets_are_the_papers():
    c = parity.presets["paper"]
    assert (c.d, c.bandwidth, c.iters, c.n_test) == (50, 5., 5, 1000) and dict(zip(c.ks, c.ns)) == parity.PAPER_N
    c = parity.presets["cpu"]
    assert {k: n for k, n in zip(c.ks, c.ns) if k < 4} == {1: 500, 2: 500, 3: 5000} and dict(zip(c.ks, c.ns))[4] >= 25_000
    c = phase_transition.presets["cpu"]
    assert (c.n, c.d, c.k, c.bandwidth) == (25_000, 50, 4, 5.)


def test_a_killed_unit_continues_and_ends_the_same(tmp_path):
    code = ("import torch; from pathlib import Path; from fact_nb.experiments.parity import Config, run_unit; from fact_nb.lab.experiment import Context\n"
            f"run_unit(Config(d=30, iters=15, n_test=100), dict(part='learn', k=2, n=700, method='fact', seed=0), Context(torch.device('cpu'), Path({str(tmp_path)!r}), False))")
    job = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "state").exists() and job.poll() is None: time.sleep(.02)
    assert job.poll() is None, "it was over before it could be killed"
    job.send_signal(sig.SIGKILL); job.wait()
    unit, cfg = dict(part="learn", k=2, n=700, method="fact", seed=0), parity.Config(d=30, iters=15, n_test=100)
    done = len(torch.load(tmp_path / "state", weights_only=True)["state"]["history"])
    assert 1 <= done < 16
    again = parity.run_unit(cfg, unit, context(tmp_path))
    (tmp_path / "state").unlink()
    whole = parity.run_unit(cfg, unit, context(tmp_path))
    assert again.rows == whole.rows and np.array_equal(again.arrays["M"], whole.arrays["M"])


def test_agop_in_the_place_of_fact_is_noticed(monkeypatch, tmp_path):
    cfg, unit = SMALL, dict(part="need", n=350, seed=0)
    true = {r["method"]: r for r in parity.run_unit(replace(cfg, need_d=12, need_iters=8), unit, context(tmp_path)).rows}
    monkeypatch.setitem(parity.METHODS, "plain", parity.METHODS["nfa"])
    fake = {r["method"]: r for r in parity.run_unit(replace(cfg, need_d=12, need_iters=8), unit, context(tmp_path)).rows}
    assert true["plain"]["frob_share"] > .9 and fake["plain"]["frob_share"] < .6


def test_judges_do_not_crash_on_a_small_result(result):
    assert set(result.df.part) == {"learn", "scan", "later", "need"}
    for name, j in parity.judges.items():
        v = j(result)
        assert v is None or v.verdict in ("holds", "holds with a change", "differs"), name


def test_every_figure_of_a_quick_result_is_drawn(result):
    for name, f in parity.figures.items():
        fig = f.draw(result)
        assert fig.axes, name
        parity.plt.close(fig)


def fake(result, **columns): return replace(result, df=result.df.assign(**columns), config=result.config | dict(d=50, later=50))


def test_learned_needs_the_papers_sizes_and_full_accuracy(result):
    df = result.df.copy()
    df.loc[df.part == "learn", "n"] = df[df.part == "learn"].k.map(parity.PAPER_N)
    df["accuracy"] = df.accuracy.where(df.part != "learn", 1.)
    four = df[(df.part == "learn") & (df.k == 3)].assign(k=4, n=25_000)
    with_four = lambda d: replace(result, df=parity.pd.concat([d, four]), config=result.config | dict(d=50))
    good = parity.judge_learned(with_four(df))
    assert good.verdict == "holds with a change" and "25,000" in good.note
    assert parity.judge_learned(with_four(df.assign(accuracy=df.accuracy.where(df.k != 2, .99)))).verdict == "differs"
    assert parity.judge_learned(replace(result, df=df, config=result.config | dict(d=50))).verdict == "differs"      # without k = 4
    four["n"] = 50_000
    assert parity.judge_learned(with_four(df)).verdict == "holds"


def test_unstable_is_judged_by_the_share_that_falls(result):
    assert parity.judge_later(result) is None                       # three iterations cannot say
    later = result.df.part == "later"
    df = result.df.assign(best=1.)
    assert parity.judge_later(fake(replace(result, df=df), drop=np.where(later, 0., np.nan))).verdict == "differs"
    assert parity.judge_later(fake(replace(result, df=df), drop=np.where(later, .3, np.nan))).verdict == "holds"
    only_plain = np.where(later & (df.method == "plain"), .3, 0.)
    assert parity.judge_later(fake(replace(result, df=df), drop=only_plain)).verdict == "differs"      # the paper averages


def test_geometric_must_keep_what_plain_has(result):
    learn = result.df.part == "learn"
    ok = fake(result, accuracy=result.df.accuracy.where(~learn, 1.))
    assert parity.judge_geometric(ok).verdict == "holds"
    worse = fake(result, accuracy=np.where(learn & (result.df.method == "fact"), .9, 1.))
    assert parity.judge_geometric(worse).verdict == "differs"


def test_the_support_is_permuted_with_the_data():
    "Relabelling the coordinates relabels M and nothing else."
    P = sparse_parity(150, 12, 2, 100, 3)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    Q = Parity(P.X[:, order], P.y, P.X_test[:, order], P.y_test, torch.argsort(order)[P.support])
    s = RFM(Gaussian(5.), iters=3, ridge=1e-6)
    a, b = follow(s, P).history[-1], follow(s, Q).history[-1]
    assert torch.allclose(a["M"][order][:, order], b["M"], rtol=1e-4, atol=1e-6) and abs(a["frob_share"] - b["frob_share"]) < 1e-4


def test_a_run_that_breaks_ends_with_its_last_good_iterate():
    P = sparse_parity(1200, 8, 2, 50, 0)                            # 256 corners: duplicates, singular at ridge 0
    with pytest.raises(ValueError, match="raise the ridge"): follow(RFM(Gaussian(5.), iters=3, ridge=0., solver="cholesky"), P)
    free = follow(RFM(Gaussian(5.), iters=30, ridge=1e-16, normalize=None, geometric=False, solver="direct"), P)
    assert all("accuracy" in h for h in free.history) and free.done


def test_bad_settings_say_what_to_do():
    for exp, text, says in [(parity, "ns=1,2", "same length"), (parity, "later_ks=7", "among ks"), (parity, "seeds_large=0", "at least 1"), (parity, "memory=0", "positive"),
                            (phase_transition, "memory=-1", "positive"), (phase_transition, "hidden=0", "at least 1"), (phase_transition, "epochs=many", "whole number")]:
        with pytest.raises(UsageError, match=says): override(exp.presets["cpu"], [text])


def test_the_network_sees_the_points_of_fact_rfm(tmp_path):
    c = phase_transition.presets["quick"]
    a, b = (phase_transition.data(c, 0, context(tmp_path), t) for t in (torch.float64, torch.float32))
    assert torch.equal(a.X > 0, b.X > 0) and torch.equal(a.y, b.y.double()) and torch.equal(a.X_test > 0, b.X_test > 0)


def test_jump_is_read_off_a_curve():
    t = np.arange(5.)
    assert phase_transition.jump(t, np.array([.7, .8, .9, .96, 1.]))["looks"] == 0
    j = phase_transition.jump(t, np.array([.5, .5, .96, .5, 1.]))
    assert j["there"] == 2. and j["flat_until"] == 1. and abs(j["rise"] - .5) < 1e-12
