"""A device that is the CPU behind a curtain: what a GPU refuses, it refuses too.

`simulated:0` computes in every precision, or without float64 (as Apple's mps) if so switched.
Mixing devices, `.numpy()`, a generator of another device, float64 where there is none: all raise.
`WAITS` counts what makes a GPU wait for the host, by the line of fact_nb that asked;
`MEMORY` counts the bytes that live on the device, and their peak.

Python only: PrivateUse1 gives the name, the guard and autograd's stream (torch ≥ 2.9), a wrapper
subclass holds the numbers. It can be made once a process. Not shown: the numbers of cuBLAS and
cuSOLVER, streams, the caching allocator, TF32, NCCL.
"""
import sys
import weakref
from collections import Counter
from pathlib import Path

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
NAME = "simulated"
WAITING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_linalg_eigh",
           "_linalg_svd"}
ON_HOST_ONLY = {"_linalg_eigvals", "linalg_eig"}        # CUDA builds without MAGMA have neither
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default,
            aten._index_put_impl_.default, aten._unsafe_index.Tensor}
COPIES = {aten._to_copy.default, aten.copy_.default}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
WAITS: Counter = Counter()
ROUNDED: Counter = Counter()        # float32 products made while TF32 was on, by line


class Memory:
    "Bytes on the device: now, at most since `reset`, and the most that there may be."
    def __init__(self):
        self.now, self.users = 0, Counter()
        self.reset()

    def reset(self, total=None, told=None, cached=0, refuse=None):
        """From here on there are `total` bytes (None: no end); the device says that there are
        `told` (None: the truth), holds `cached` of them back, and has none where `refuse(size)`."""
        self.peak, self.made, self.total = self.now, 0, total
        self.told, self.cached = total if told is None else told, cached
        self.refuse = refuse or (lambda size: False)

    def take(self, t, owner):
        "Count the storage of a tensor until its last owner is gone."
        storage = t.untyped_storage()
        try:
            key, size = storage.data_ptr(), storage.nbytes()
        except RuntimeError: return         # a tensor inside vmap has no memory of its own
        if not size: return
        if not self.users[key]:
            self.now += size
            self.made += 1
            full = self.total is not None and self.now > self.total
            if full or self.refuse(size):
                self.now -= size
                raise torch.OutOfMemoryError(f"{NAME} out of memory. Tried to allocate {size} B")
        self.users[key] += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(owner, self.give_back, key, size).atexit = False

    def give_back(self, key, size):
        self.users[key] -= 1
        if self.users[key]: return
        del self.users[key]
        self.now -= size


MEMORY = Memory()


class Held:
    "Lives as long as its tensor. (A tensor with weak references to it could not be swapped.)"


class Module(backend_registration._DummyBackendModule):
    "torch.simulated: two devices, each with random numbers of its own."
    float64 = True

    def __init__(self):
        self.states = [torch.Generator().manual_seed(100 + i).get_state() for i in range(2)]

    def device_count(self): return 2

    def manual_seed_all(self, seed):
        self.states = [torch.Generator().manual_seed(seed).get_state() for _ in range(2)]

    def get_rng_state(self, device=0): return self.states[index_of(device)].clone()

    def set_rng_state(self, state, device=0):
        self.states[index_of(device)] = state.clone()

    def mem_get_info(self, device=0):
        total = 2**34 if MEMORY.told is None else MEMORY.told
        return total - MEMORY.now - MEMORY.cached, total

    def memory_allocated(self, device=0): return MEMORY.now
    def memory_reserved(self, device=0): return MEMORY.now + MEMORY.cached


class Hooks(backend_registration._DummyPrivateUse1Hook):
    def device_count(self): return 2


module = Module()
backend_registration._setup_privateuseone_for_python_backend(NAME, module, Hooks())
DEVICE = torch.device(NAME, 0)


def index_of(device):
    if isinstance(device, int): return device
    return torch.device(device).index or 0


def place(device):
    "The simulated device that is meant, or None."
    if device is None or torch.device(device).type != NAME: return None
    return torch.device(NAME, index_of(device))


class Generator(torch.Generator):
    "torch.Generator(device='simulated')"
    def __new__(cls, device="cpu"):
        self = super().__new__(cls)
        self.place = place(device)
        return self

    device = property(lambda self: self.place or torch.device("cpu"))


class Hidden(torch.Tensor):
    "A tensor of the host that says it is on the device."
    @staticmethod
    def __new__(cls, t, where):
        if t.dtype == torch.float64 and not module.float64:
            raise TypeError(f"Cannot convert a {where} tensor to float64 dtype: "
                            "the device does not support float64. Use float32 instead.")
        self = torch.Tensor._make_wrapper_subclass(
            cls, t.size(), strides=t.stride(), storage_offset=t.storage_offset(), dtype=t.dtype,
            layout=t.layout, device=t.device, requires_grad=t.requires_grad, dispatch_device=True)
        self.host, self.spot = t, where
        self.held = Held()
        MEMORY.take(t, self.held)
        return self

    def __tensor_flatten__(self): return ["host"], self.spot   # tied weights stay tied by .to
    @staticmethod
    def __tensor_unflatten__(inner, where, size, stride): return Hidden(inner["host"], where)

    def data_ptr(self): return self.host.data_ptr()

    def numpy(self, *a, **k):
        raise TypeError(f"can't convert {self.spot} device type tensor to numpy. "
                        "Use Tensor.cpu() to copy the tensor to host memory first.")
    __array__ = numpy

    def tolist(self): return self.detach().cpu().tolist()
    def __reduce_ex__(self, protocol): return self.detach().host.__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        new = Hidden(self.detach().host.clone(), self.spot).requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False): new._is_param = True
        return memo.setdefault(id(self), new)

    def __repr__(self): return f"{self.spot} {self.detach().host!r}"
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def dispatch(func, args, kwargs):
    "Check the devices, compute on the host, and hide the result."
    hidden = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Hidden)]
    if func is torch.ops.prim.device.default: return hidden[0].spot
    mine = hidden[0].spot if hidden else None
    to, name = kwargs.get("device"), func._schema.name.removeprefix("aten::")
    if name in ON_HOST_ONLY: raise RuntimeError(f"{name} is not available on {mine}")
    if mine and func not in COPIES: check_places(func, args, kwargs, mine)
    there = place(to) or (mine if to is None else None)
    check_generator(kwargs.get("generator"), there or mine)
    leaves = to is not None and place(to) != mine
    if mine and (name in WAITING or leaves): WAITS[f"{name} {caller()}"] += 1
    if name in PRODUCTS and hidden[0].dtype == torch.float32 and tf32_is_on():
        ROUNDED[caller()] += 1
    out = compute(func, tree_map(on_host, args), tree_map(on_host, kwargs), there)
    if func is aten.copy_.default: return args[0]
    if there is None: return out
    hide = lambda x: Hidden(x, there) if isinstance(x, torch.Tensor) else x
    return return_and_correct_aliasing(func, args, kwargs, tree_map(hide, out))


def tf32_is_on(): return torch.backends.cuda.matmul.fp32_precision == "tf32"


def on_host(x):
    if isinstance(x, Hidden): return x.host
    return torch.device("cpu") if isinstance(x, torch.device) else x


def compute(func, args, kwargs, there):
    "On the host; random numbers without a generator come from the device's own."
    chance = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
    if there is None or not chance: return func(*args, **kwargs)
    kept = torch.get_rng_state()
    torch.set_rng_state(module.states[there.index])
    try:
        return func(*args, **kwargs)
    finally:
        module.states[there.index] = torch.get_rng_state()
        torch.set_rng_state(kept)


def check_places(func, args, kwargs, mine):
    "A host tensor may take part if it has no dimension and is not written, or as an index."
    named = [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
    for a, value in [*zip(func._schema.arguments, args), *named]:
        if func in INDEXING and a.name == "indices": continue
        written = a.alias_info is not None and a.alias_info.is_write
        for t in tree_leaves(value):
            if not isinstance(t, torch.Tensor) or getattr(t, "spot", None) == mine: continue
            if isinstance(t, Hidden) or t.ndim or written:
                raise RuntimeError("Expected all tensors to be on the same device, but found "
                                   f"at least two devices, {mine} and {t.device}! ({func})")


def check_generator(g, there):
    if not isinstance(g, torch.Generator): return
    if getattr(g, "place", None) != there:
        raise RuntimeError(f"Expected a generator on {there or 'cpu'}, this is on {g.device}")


def caller():
    "The line of fact_nb that asked."
    f = sys._getframe(2)
    while f is not None and "fact_nb" not in Path(f.f_code.co_filename).parts:
        f = f.f_back
    return f"{Path(f.f_code.co_filename).name}:{f.f_lineno}" if f else "elsewhere"


class Present(TorchDispatchMode):
    "with Present(): torch.zeros(3, device='simulated') works; torch.load knows the device."
    def __init__(self, float64=True):
        super().__init__()
        self.float64 = float64

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        mine = any(issubclass(t, Hidden) for t in types) or place(kwargs.get("device"))
        return dispatch(func, args, kwargs) if mine else func(*args, **kwargs)

    def __enter__(self):
        self.old = torch.Generator, torch.tensor, torch.as_tensor, torch.load
        module.float64 = self.float64
        torch.Generator = Generator
        torch.tensor, torch.as_tensor, torch.load = self.tensor, self.as_tensor, self.load
        return super().__enter__()

    def __exit__(self, *e):
        torch.Generator, torch.tensor, torch.as_tensor, torch.load = self.old
        module.float64 = True
        return super().__exit__(*e)

    def tensor(self, data, *, device=None, requires_grad=False, **k):
        if place(device) is None: return self.old[1](data, device=device, requires_grad=requires_grad, **k)
        return self.old[1](data, **k).to(device).requires_grad_(requires_grad)

    def as_tensor(self, data, dtype=None, device=None):
        if isinstance(data, torch.Tensor): return data.to(device or data.device, dtype or data.dtype)
        made = self.old[2](data, dtype=dtype)
        return made if device is None else made.to(device)

    def load(self, f, map_location=None, **k):
        there = place(map_location) if isinstance(map_location, (str, torch.device)) else None
        if there is None: return self.old[3](f, map_location=map_location, **k)
        send = lambda x: x.to(there) if isinstance(x, torch.Tensor) else x
        return tree_map(send, self.old[3](f, map_location="cpu", **k))


def forget():
    "Start counting waits and bytes anew."
    WAITS.clear()
    ROUNDED.clear()
    MEMORY.reset()
