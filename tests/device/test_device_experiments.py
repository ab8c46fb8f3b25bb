"One unit of each kind of every experiment on a device, killed and resumed; all quick units if slow."
import numpy as np
import pytest
import torch

from fact_nb.lab.experiment import Context, override, registry
from fact_nb.lab.store import plain

pytestmark = pytest.mark.filterwarnings("ignore")

# Settings at which a unit takes a second or less.
SMALL = dict(
    deep_linear="depths=2 epochs=2 polish_steps=20 width=8 noise=128",
    parity="ns=60,60,80 seeds=1 later=3 need_ns=60",
    phase_transition="n=200 epochs=2",
    grokking="p=11 iters=3 nfa_iters=3 draws=2",
    similarity="p=11 other_p=11 iters=3 nfa_iters=3",
    depth="epochs=3 polish=6 window=3 seeds=1 n=100 width=12",
    epochs="epochs=10 looks=10 n=60 width=8 layers=1",
    motion="epochs=3 n=100 width=12 exact_epochs=2 flow_time=1",
    tabular="iters=1",
    stable="iters=2",
    theorem="iters=50",
    separation="seeds=1 eps=0.9",
    kernel_theory="seeds=1",
    linear_kernel="cs=3 ridges=10 seeds=1 iters=3 n=40 d=8",
    relu_kinks="epochs=3 seeds=1 iters=3",
    samples="epochs=3 features=3",
    margins="levels=-0.1,-1 fall=0.2",
    adamw="seeds=1 archs=mlp steps=20 gpt_steps=20 account_steps=5",
    no_decay="seeds=1 iters=50 zero_steps=200 motion_time=1 steps=40,40")
WORDS = ("part", "task", "learner", "op", "method", "protocol", "setting", "schedule", "net",
         "noise")


def config(name):
    return override(registry()[name].preset("quick"), SMALL[name].split())


def kinds(name, cfg):
    "One unit of each kind."
    found = {}
    for u in registry()[name].units(cfg):
        found.setdefault(tuple(str(u.get(w)) for w in WORDS), u)
    return list(found.values())


def one_of_each(name):
    return [pytest.param(name, u, id=f"{name}-" + "-".join(map(str, u.values())))
            for u in kinds(name, config(name))]


EACH = [p for name in SMALL for p in one_of_each(name)]


def done(name, unit, device, folder, save_every=0.):
    exp, cfg = registry()[name], config(name)
    where = torch.device("cpu") if exp.work(cfg, unit).cpu_only else device
    return exp.run_unit(cfg, unit, Context(where, folder, False, save_every))


def same(a, b):
    "Equal rows and arrays, but for what says how long it took."
    clock = lambda row: {k: v for k, v in row.items() if k not in ("seconds", "share")}
    assert len(a.rows) == len(b.rows)
    for x, y in zip(plain(a.rows), plain(b.rows)):
        x, y = clock(x), clock(y)
        assert x.keys() == y.keys()
        for k in x:
            if isinstance(x[k], float): assert y[k] == pytest.approx(x[k], rel=1e-6, abs=1e-9), k
            else: assert x[k] == y[k], k
    for k in a.arrays:
        p, q = (np.asarray(getattr(o.arrays[k], "cpu", lambda o=o: o.arrays[k])()) for o in (a, b))
        np.testing.assert_allclose(p, q, rtol=1e-4, atol=1e-6, err_msg=k)


def killed_writes(monkeypatch, after):
    "Ends the process, as a kill would, once so many checkpoints were written."
    import fact_nb.files as files
    written = []
    write = files.write_atomic
    def counted(path, content):
        write(path, content)
        written.append(path)
        if len(written) == after: raise KeyboardInterrupt
    monkeypatch.setattr(files, "write_atomic", counted)
    return written


def on_device():
    "Did this unit, just done, compute on the device? Only the simulated one can tell."
    import simulated
    return simulated.MEMORY.made > 0


@pytest.mark.parametrize("name,unit", EACH)
def test_a_killed_unit_ends_as_an_uninterrupted_one(name, unit, device, tmp_path, monkeypatch):
    "Killed at its middle and at its last but one checkpoint, resumed, compared."
    with monkeypatch.context() as m:
        written = killed_writes(m, None)
        whole = done(name, unit, device, tmp_path / "whole")
    if device.type == "simulated":      # honoured, or a reason why not
        assert on_device() != bool(registry()[name].work(config(name), unit).cpu_only)
    for after in sorted({(len(written) + 1) // 2, max(1, len(written) - 1)} if written else ()):
        folder = tmp_path / str(after)
        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            killed_writes(m, after)
            done(name, unit, device, folder)
        same(whole, done(name, unit, device, folder))


def test_no_experiment_is_left_out():
    assert set(SMALL) == set(registry())


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_all_quick_units(name, device, tmp_path):
    exp = registry()[name]
    cfg = exp.preset("quick")
    for i, unit in enumerate(exp.units(cfg)):
        where = torch.device("cpu") if exp.work(cfg, unit).cpu_only else device
        exp.run_unit(cfg, unit, Context(where, tmp_path / str(i), False))
