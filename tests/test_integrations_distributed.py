"""Models as they stand in a distributed run: sharded, tensor parallel, on one rank only.

One pair of gloo processes goes through all cases; what it measures is compared, inside it, with one
process and a plain model.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_measure_behaviour import free_port

START = """
import os, sys, warnings, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from fact_nb.networks import processes
from fact_nb.networks.measure import measure
from fact_nb.networks.moving_average import Motion
rank, port, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
ce, said = nn.functional.cross_entropy, []
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Flatten(), nn.Linear(18, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(),
                         nn.Linear(5, 3)).double()
torch.manual_seed(1)
X, Y = torch.randint(7, (12, 3)), torch.randint(3, (12,))
mine = [(X[rank::2][:2], Y[rank::2][:2]), (X[rank::2][2:], Y[rank::2][2:])]
def worst(rep, one):
    pairs = [(getattr(rep[k], q), getattr(one[k], q)) for k in one.layers
             for q in ("nfm", "fact", "agop", "enfa", "bnfm", "bfact", "bagop", "benfa") if q not in one[k].missing]
    assert list(rep.layers) == list(one.layers) and len(pairs) > 20
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)
def say(case, *words): said.append(case + ": " + " ".join(map(str, words)))
"""
END = """
open(out, "w").write(chr(10).join(said))
os._exit(0)          # gloo's threads now and then abort when the interpreter takes them down
"""


FSDP = """
one = measure(network(), ce, [(X, Y)], .1, distributed=False)
def sharded(**kw):
    net = network()
    for part in net:
        if isinstance(part, nn.Linear): fully_shard(part, mesh=mesh, **kw)
    fully_shard(net, mesh=mesh, **kw)
    return net
net = sharded()
assert net[2].weight.to_local().numel() < net[2].weight.numel()
opt = torch.optim.SGD([dict(params=list(net[:4].parameters()), weight_decay=.1), dict(params=list(net[4:].parameters()), weight_decay=.1)], lr=.1)
say("fsdp", "fresh", worst(measure(net, ce, mine, .1), one) < 1e-12)
say("fsdp", "optimizer", worst(measure(net, ce, mine, opt), one) < 1e-12)
# training goes on as if nobody had looked: one step with and one without a look between
other = sharded()
ways = []
for model, looks in ((net, True), (other, False)):
    sgd = torch.optim.SGD(model.parameters(), lr=.1, momentum=.5, weight_decay=.1)
    if looks: motion = Motion(model, sgd, exact=True)
    for x, y in mine:
        sgd.zero_grad(); ce(model(x), y).backward()
        if looks: measure(model, ce, mine, sgd)
        sgd.step()
    ways.append([p.full_tensor() for p in model.parameters()])
say("fsdp", "undisturbed", all(torch.equal(a, b) for a, b in zip(*ways)))
say("fsdp", "motion", motion.count == 2 and (motion.table().r_exact < 1e-9).all())
plain = network()
plain.load_state_dict({k: p for (k, _), p in zip(plain.named_parameters(), ways[0])})
say("fsdp", "trained", worst(measure(net, ce, mine, .1), measure(plain, ce, [(X, Y)], .1, distributed=False)) < 1e-12)
say("fsdp", "uneven", worst(measure(net, ce, mine + mine if rank else [], .1), measure(plain, ce, [(X[1::2], Y[1::2])], .1, distributed=False)) < 1e-12)
half = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
say("fsdp", "mixed", worst(measure(half, ce, mine, .1), one) < 1e-12)
"""

TENSOR = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
wide = nn.Sequential(nn.Linear(18, 6), nn.Tanh(), nn.Linear(6, 4)).double()
copy = nn.Sequential(nn.Linear(18, 6), nn.Tanh(), nn.Linear(6, 4)).double()
copy.load_state_dict(wide.state_dict())
torch.manual_seed(2); Z = torch.randn(8, 18).double(); T = torch.randint(4, (8,))
for m in (wide, copy):
    torch.manual_seed(3)
    for p in m.parameters(): torch.nn.init.normal_(p)
tp = parallelize_module(wide, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
a, b = measure(tp, ce, [(Z, T)], .1), measure(copy, ce, [(Z, T)], .1, distributed=False)
gaps = [float((getattr(a[k], q) - getattr(b[k], q)).norm() / getattr(b[k], q).norm()) for k in b.layers for q in ("fact", "bfact", "agop", "enfa")]
say("tensor", "equal", max(gaps) < 1e-12, len(gaps))
say("tensor", "still parallel", hasattr(tp[0].weight, "full_tensor"), torch.allclose(tp(Z), copy(Z)))
"""

ALONE = """
import time, warnings
processes.PATIENCE = 4.
net = network()
def attempt():
    start, told = time.monotonic(), []
    warnings.simplefilter("always")
    warnings.showwarning = lambda text, *rest, **kw: told.append((str(text), time.monotonic() - start))
    try: rep = measure(net, ce, mine, .1)
    except RuntimeError as e:
        soon = [seconds < 3.5 for text, seconds in told if "measure waits in process" in text and "if rank == 0" in text]
        return f"{e} | {time.monotonic() - start < 20} | told before it fails {soon}"
    return f"n {rep.n:.0f}"
if rank == 0: say("alone", attempt())
dist.barrier()
say("alone", attempt())                 # the failed call has put nobody ahead
say("alone", attempt())
if rank == 1: say("alone", attempt())
dist.barrier()
if rank == 0: say("alone", int(measure(net, ce, mine, .1, distributed=False).n))
say("alone", attempt())
"""

FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel
try: measure(FullyShardedDataParallel(network(), device_id=torch.device("cpu")), ce, mine, .1)
except ValueError as e: say("fsdp1", e)
"""

TRAINER = """
import os
os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
sys.path.insert(0, sys.argv[4])
try: import transformers, accelerate
except ImportError: say("trainer", "missing")
else:
    from test_integrations import LAYER, Text, by_hand, hf_trainer, pearson_of
    from fact_nb.integrations.huggingface import FactCallback
    trainer = hf_trainer(out + "-trainer", ddp_backend="gloo")
    callback = FactCallback(trainer, every=3, samples=18)
    trainer.add_callback(callback)
    trainer.train()
    fact, W = by_hand(trainer.model, [Text()[i] for i in range(18)], LAYER, .1)
    gap = abs(callback.history.iloc[-1][f"fact/{LAYER}/FACT"] - pearson_of(fact, W.T @ W))
    say("trainer", type(trainer.model_wrapped).__name__, callback.history.step.tolist(), gap < 1e-4)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    "What each of two processes said, line by line."
    folder, port = tmp_path_factory.mktemp("processes"), free_port()
    script = folder / "worker.py"
    script.write_text(START + FSDP + TENSOR + ALONE + FSDP1 + TRAINER + END)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    start = lambda r: subprocess.Popen([sys.executable, script, str(r), port, folder / str(r), Path(__file__).parent], env=env, stderr=subprocess.PIPE)
    runs = [start(0), start(1)]
    try: errors = [p.communicate(timeout=600)[1].decode() for p in runs]
    finally:
        for p in runs: p.kill()
    assert [p.returncode for p in runs] == [0, 0], errors
    return [(folder / str(r)).read_text().splitlines() for r in (0, 1)]


def of_case(lines, case):
    return [line.removeprefix(f"{case}: ") for line in lines if line.startswith(f"{case}: ")]


def test_fully_shard_equals_one_process(said):
    "Weights and data in two halves: the report of either process is that of the plain model on all data."
    cases = ("fresh", "optimizer", "undisturbed", "motion", "trained", "uneven", "mixed")
    for lines in said:
        assert of_case(lines, "fsdp") == [f"{case} True" for case in cases]


def test_tensor_parallel_equals_one_process(said):
    for lines in said:
        assert of_case(lines, "tensor") == ["equal True 8", "still parallel True True"]


def test_a_call_on_one_rank_only_says_so(said):
    "Told after a second, over after PATIENCE and not after the group's timeout; the failed call puts no process ahead of the other."
    line = ("measure was called in process {} and not in [{}] within 4 s: call it in every process "
            "(not under `if rank == 0:`), or pass distributed=False | True | told before it fails [True]")
    assert of_case(said[0], "alone") == [line.format(0, 1), "n 12", "n 12", "6", "n 12"]
    assert of_case(said[1], "alone") == ["n 12", "n 12", line.format(1, 0), "n 12"]


def test_fsdp1_is_refused_with_a_line(said):
    for lines in said:
        (line,) = of_case(lines, "fsdp1")
        assert "shard with torch.distributed.fsdp.fully_shard instead" in line


def test_the_trainer_in_two_processes(said):
    "Each process measures its share of the probe; the number is that of all rows together, by torch alone."
    for lines in said:
        (line,) = of_case(lines, "trainer")
        if line == "missing": pytest.skip("pip install 'fact_nb[integrations]'")
        assert line == "DistributedDataParallel [0, 3, 6] True"
