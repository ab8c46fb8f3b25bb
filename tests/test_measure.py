"""`measure` against brute force. The references import only torch: one sample at a time, one output at a time, loops over positions."""
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fact_nb.linalg import cosine, rel_err
from fact_nb.runtime import seeded
from fact_nb.networks.measure import measure

QS = ("fact", "bfact", "agop", "bagop", "enfa", "benfa")


# ---------------------------------------------------------------- the reference

def outer(a, b):
    return a[:, None] * b[None, :]


def brute(run, W, X, Y, loss_fn, lam):
    """Sums over samples, positions and calls.

    run(x) → (output f of one sample, [(h, z)]) where z = W h + anything that does not depend on W; h is positions × d, z positions × d'.
    """
    n = len(X)
    W = W.detach()
    acc = {q: torch.zeros(W.shape[1 if q[0] != "b" else 0], W.shape[1 if q[0] != "b" else 0], dtype=W.dtype) for q in QS}
    for x, y in zip(X, Y):
        f, pairs = run(x[None])
        zs = [z for _, z in pairs]
        for (h, z), g in zip(pairs, torch.autograd.grad(loss_fn(f, y[None]), zs, retain_graph=True)):
            for hp, gp in zip(h.detach(), g):
                u = W.T @ gp
                acc["fact"] -= outer(u, hp) / (n * lam)
                acc["bfact"] -= outer(W @ hp, gp) / (n * lam)
                acc["enfa"] += outer(u, u) / n
                acc["benfa"] += outer(gp, gp) / n
        for fc in f.reshape(-1):
            for J in torch.autograd.grad(fc, zs, retain_graph=True):
                for jp in J:
                    acc["agop"] += outer(W.T @ jp, W.T @ jp) / n
                    acc["bagop"] += outer(jp, jp) / n
    return acc


def check(layer, acc, qs=QS, tol=1e-8):
    for q in qs:
        A = getattr(layer, q)
        assert rel_err(acc[q], A) < tol, (layer.name, q, rel_err(acc[q], A))


def batches(X, Y, size=4):
    return [(X[i:i + size], Y[i:i + size]) for i in range(0, len(X), size)]


def rows(h, z):
    return h.reshape(-1, h.shape[-1]), z.reshape(-1, z.shape[-1])


ce = F.cross_entropy
mse = lambda f, y: (f - y).square().flatten(1).sum(1).mean() / 2


# ---------------------------------------------------------------- six architectures

@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_relu_mlp(bias, loss):
    with seeded(0):
        m = nn.Sequential(nn.Linear(6, 7, bias=bias), nn.ReLU(), nn.Linear(7, 5, bias=bias), nn.ReLU(), nn.Linear(5, 3, bias=bias)).double()
        X = torch.randn(10, 6).double()
        Y = torch.randint(3, (10,)) if loss == "ce" else torch.randn(10, 3).double()
    fn = dict(ce=ce, mse=mse)[loss]
    rep = measure(m, fn, batches(X, Y), .03)                      # the last batch holds 2
    for k in (0, 2, 4):
        def run(x):
            h = x
            for j, mod in enumerate(m):
                z = mod(h)
                if j == k: pair = rows(h, z)                       # noqa: E701
                if j == k: z = pair[1].reshape(z.shape)            # noqa: E701
                h = z
            return h, [pair]
        check(rep[str(k)], brute(run, m[k].weight, X, Y, fn, .03))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.a, self.b, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x, tape=None):
        h = torch.tanh(self.inp(x))
        for name in "ab":
            z = getattr(self, name)(h)
            if tape is not None: tape[name] = (h, z)               # noqa: E701
            h = h + torch.tanh(z) + .5 * h * h
        return self.out(h)


def test_residual_connections():
    with seeded(1):
        m, X, Y = Residual().double(), torch.randn(9, 4).double(), torch.randn(9, 2).double()
    rep = measure(m, mse, batches(X, Y), .1)
    assert rep.layers == ["inp", "a", "b", "out"]
    for name in "ab":
        def run(x):
            tape = {}
            return m(x, tape), [tape[name]]
        acc = brute(run, getattr(m, name).weight, X, Y, mse, .1)
        check(rep[name], acc)
        h = []                                                       # the trap: gradients of every user of h
        for x, y in zip(X, Y):
            tape = {}
            L = mse(m(x[None], tape), y[None])
            h.append((tape[name][0][0].detach(), torch.autograd.grad(L, tape[name][0])[0][0]))
        trap = -sum(outer(g, a) for a, g in h) / (len(X) * .1)
        assert rel_err(acc["fact"], trap) > .5


class Conv(nn.Module):
    def __init__(self, dim=2, mode="zeros"):
        super().__init__()
        C = nn.Conv2d if dim == 2 else nn.Conv1d
        self.c1 = C(2, 4, 3, stride=2, padding=1, padding_mode=mode)
        self.c2 = C(4, 6, 2, groups=2, dilation=2, padding=2, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = F.relu(self.c1(x))
        h = torch.tanh(self.c2(h))
        return self.head(h.flatten(2).mean(2))


def patches(x, conv):
    """All patches of one image by explicit slicing: positions × (channels · kernel)."""
    pad = conv.padding[0]
    if x.ndim == 3: x, k, s, dil = x[:, :, None], (1, conv.kernel_size[0]), (1, conv.stride[0]), (1, conv.dilation[0])   # noqa: E701
    else: k, s, dil = conv.kernel_size, conv.stride, conv.dilation                                                        # noqa: E701
    p = (pad, pad, pad, pad) if x.shape[2] > 1 or k[0] > 1 else (pad, pad, 0, 0)
    x = F.pad(x, p, mode="circular" if conv.padding_mode == "circular" else "constant")
    out = []
    for i in range(0, x.shape[2] - dil[0] * (k[0] - 1), s[0]):
        for j in range(0, x.shape[3] - dil[1] * (k[1] - 1), s[1]):
            out.append(x[0, :, i:i + dil[0] * (k[0] - 1) + 1:dil[0], j:j + dil[1] * (k[1] - 1) + 1:dil[1]])
    return torch.stack(out)                                        # positions × channels × kernel


@pytest.mark.parametrize("dim,mode", [(2, "zeros"), (1, "zeros"), (2, "circular")])
def test_convolution_with_stride_and_groups(dim, mode):
    with seeded(2):
        m = Conv(dim, mode).double()
        X, Y = torch.randn(5, 2, *[7] * dim).double(), torch.randint(3, (5,))
    rep = measure(m, ce, batches(X, Y, 2), .05)
    assert rep.layers == ["c1", "c2[0]", "c2[1]", "head"]

    def forward(x, W1, W2):
        """The same net with its convolutions written as products with patches."""
        P = patches(x, m.c1).flatten(1)
        z1 = P @ W1.T + m.c1.bias
        side = [round(len(P) ** (1 / dim))] * dim if dim == 2 else [len(P)]
        h = F.relu(z1).T.reshape(1, 4, *side)
        Q = patches(h, m.c2)
        z2 = [Q[:, 2 * g:2 * g + 2].flatten(1) @ W2[g].T for g in (0, 1)]
        f = m.head(torch.tanh(torch.cat(z2, 1)).mean(0)[None])
        return f, (P, z1), [(Q[:, 2 * g:2 * g + 2].flatten(1), z2[g]) for g in (0, 1)]

    W1, W2 = m.c1.weight.flatten(1), [m.c2.weight[:3].flatten(1), m.c2.weight[3:].flatten(1)]
    assert torch.allclose(forward(X[:1], W1, W2)[0], m(X[:1]))     # the rewriting is right
    check(rep["c1"], brute(lambda x: (lambda f, a, b: (f, [a]))(*forward(x, W1, W2)), W1, X, Y, ce, .05))
    for g in (0, 1):
        check(rep[f"c2[{g}]"], brute(lambda x: (lambda f, a, b: (f, [b[g]]))(*forward(x, W1, W2)), W2[g], X, Y, ce, .05))


class Block(nn.Module):
    """A transformer block; `tape` uses a hand-written attention."""
    def __init__(self, batch_first=True, cross="self"):
        super().__init__()
        kw = dict(kdim=3, vdim=5) if cross == "dims" else {}
        self.attn, self.bf, self.cross = nn.MultiheadAttention(4, 2, batch_first=batch_first, **kw), batch_first, cross
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.head = nn.Linear(4, 2)

    def finish(self, x, a, tape=None):
        h = x + a
        n = self.norm(h)
        n, z = rows(n, self.up(n))
        if tape is not None: tape["up"] = (n, z)                     # noqa: E701
        return self.head((h + self.down(F.gelu(z)).reshape(h.shape)).mean(1))

    def keys(self, x):
        """Keys and values: x itself, of other widths, one other tensor (as in a decoder), or two."""
        other = 2 * x.flip(1)
        return {"self": (x, x), "dims": (x[..., :3], torch.cat([x, x[..., :1]], -1)), "memory": (other, other), "apart": (other, x + 1)}[self.cross]

    def forward(self, x):
        k, v = self.keys(x)
        if not self.bf: return self.finish(x, self.attn(x.transpose(0, 1), *self.first(k, v), need_weights=False)[0].transpose(0, 1))   # noqa: E701
        return self.finish(x, self.attn(x, k, v)[0])

    def first(self, k, v):
        kt = k.transpose(0, 1)
        return kt, kt if v is k else v.transpose(0, 1)

    def taped(self, x):
        k, v = self.keys(x)
        A, tape = self.attn, {}
        Ws = [A.q_proj_weight, A.k_proj_weight, A.v_proj_weight] if self.cross == "dims" else A.in_proj_weight.chunk(3)
        hs = dict(zip("qkv", (x[0], k[0], v[0])))
        z = {c: hs[c] @ W.T + b for c, W, b in zip("qkv", Ws, A.in_proj_bias.chunk(3))}
        heads = []
        for j in range(2):
            q, kk, vv = (z[c][:, 2 * j:2 * j + 2] for c in "qkv")
            heads.append(torch.softmax(q @ kk.T / 2 ** .5, -1) @ vv)
        h = torch.cat(heads, -1)
        zo = h @ A.out_proj.weight.T + A.out_proj.bias
        tape |= {f"attn.{c}": (hs[c], z[c]) for c in "qkv"} | {"attn.out_proj": (h, zo)}
        return self.finish(x, zo[None], tape), tape, dict(zip(("attn.q", "attn.k", "attn.v", "attn.out_proj"), (*Ws, A.out_proj.weight)))


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("cross", ["self", "dims", "memory", "apart"])
@pytest.mark.parametrize("frozen", [False, True])
def test_transformer_block(mode, batch_first, cross, frozen):
    with seeded(3):
        m = Block(batch_first, cross).double()
        X, Y = torch.randn(3, 4, 4).double(), torch.randint(2, (3,))
    if frozen: m.attn.requires_grad_(False)                          # noqa: E701
    assert torch.allclose(m.taped(X[:1])[0], m(X[:1]))
    rep = measure(m, ce, batches(X, Y, 2), .05, mode=mode)
    assert rep.layers == ["attn.q", "attn.k", "attn.v", "attn.out_proj", "up", "down", "head"]
    Ws = m.taped(X[:1])[2] | {"up": m.up.weight}
    for p in m.parameters(): p.requires_grad_()                      # noqa: E701
    for name, W in Ws.items():
        acc = brute(lambda x: (lambda f, tape, _: (f, [tape[name]]))(*m.taped(x)), W, X, Y, ce, .05)
        gone = frozen and name.startswith("attn")
        check(rep[name], acc, QS[2:] if gone else QS)
        if gone:
            with pytest.raises(ValueError, match="frozen"): rep[name].fact   # noqa: E701
            assert "frozen" in rep.skipped[f"{name} (FACT)"]


def test_encoder_layer_in_eval_mode_sees_every_projection():
    with seeded(4):
        m = nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True), 2), nn.Flatten(), nn.Linear(24, 2)).double().eval()
        X, Y = torch.randn(4, 3, 8).double(), torch.randint(2, (4,))
    for grad in (True, False):
        m.requires_grad_(grad)
        rep = measure(m, ce, [(X, Y)], .1)
        names = [f"0.layers.{i}.{s}" for i in (0, 1) for s in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.out_proj", "linear1", "linear2")]
        assert rep.layers == names + ["2"]
        for k in rep.layers: assert rep[k].agop.norm() > 0 and rep[k].enfa.norm() > 0   # noqa: E701


class Tied(nn.Module):
    def __init__(self, functional=False, pad=None):
        super().__init__()
        self.emb, self.mid = nn.Embedding(7, 4, padding_idx=pad), nn.Linear(4, 4)
        if not functional:
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.emb.weight

    def forward(self, x):
        h = torch.tanh(self.mid(self.emb(x).cumsum(1)))
        return self.head(h) if hasattr(self, "head") else F.linear(h, self.emb.weight)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("pad", [None, 0])
def test_tied_embeddings(functional, pad):
    with seeded(5):
        m = Tied(functional, pad).double()
        with torch.no_grad(): m.emb.weight.normal_()                 # noqa: E701
        X, Y = torch.randint(7, (6, 3)), torch.randint(7, (6, 3))
    loss = lambda f, y: ce(f.reshape(-1, 7), y.reshape(-1))
    rep = measure(m, loss, batches(X, Y), .2, embedding="both")
    assert rep.layers == ["emb", "mid"]
    head = "emb as linear" if functional else "head"
    assert list(rep["emb"].uses) == ["emb", head]
    E = m.emb.weight

    def run(x):
        z1 = F.embedding(x[0], E)
        h2 = torch.tanh(m.mid(z1.cumsum(0)))
        z2 = h2 @ E.T
        real = x[0] != (-1 if pad is None else pad)
        return z2[None], (F.one_hot(x[0], 7).double(), z1, real), (h2, z2)

    def embedding(x):
        f, (h, z, real), _ = run(x)
        return f, [(h, z)]
    if pad is None:
        acc = brute(embedding, E.T, X, Y, loss, .2)
        check(rep["emb"].uses["emb"], acc, QS[2:])
    acc_head = brute(lambda x: (lambda f, a, b: (f, [b]))(*run(x)), E, X, Y, loss, .2)
    check(rep["emb"].uses[head], acc_head, QS[2:])
    if pad is None:                                                   # total: W = Eᵀ, so the head's FACT enters on the other side
        assert rel_err(acc["fact"] + acc_head["bfact"], rep["emb"].fact) < 1e-8
        assert rel_err(acc["bfact"] + acc_head["fact"], rep["emb"].bfact) < 1e-8
    with pytest.raises(ValueError, match="one for each"): rep["emb"].agop   # noqa: E701
    t = rep.table()
    assert list(t.index) == ["emb", "emb as emb", f"emb as {head}", "mid"]


def test_padding_positions_do_not_count():
    with seeded(6):
        m = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 2)).double()
        X, Y = torch.tensor([[0, 1], [2, 0], [3, 4]]), torch.tensor([0, 1, 0])
    rep = measure(m, ce, [(X, Y)], .1)
    rows_ = []
    for x, y in zip(X, Y):
        z = m[0](x[None])
        g = torch.autograd.grad(ce(m[2](z.flatten(1)), y[None]), z)[0][0]
        rows_ += [gp for xp, gp in zip(x, g) if xp != 0]
    assert rel_err(sum(outer(g, g) for g in rows_) / 3, rep["0"].benfa) < 1e-12
    with pytest.raises(ValueError, match="5 × 5"): rep["0"].fact       # noqa: E701
    assert "embedding=" in rep.skipped["0 (input side)"]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.rec, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, tape=None):
        h = torch.tanh(self.inp(x))
        for _ in range(2):
            z = self.rec(h)
            if tape is not None: tape.append((h, z))                 # noqa: E701
            h = torch.tanh(z)
        return self.out(h)


def test_layer_used_twice():
    with seeded(7):
        m, X, Y = Twice().double(), torch.randn(7, 3).double(), torch.randn(7, 2).double()

    def run(x):
        tape = []
        return m(x, tape), tape
    rep = measure(m, mse, batches(X, Y), .1)
    check(rep["rec"], brute(run, m.rec.weight, X, Y, mse, .1))


def test_two_modules_that_share_a_weight():
    with seeded(8):
        m = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        m[2].weight = m[0].weight
        X, Y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    rep = measure(m, mse, batches(X, Y), .1)
    assert rep.layers == ["0", "4"] and list(rep["0"].uses) == ["0", "2"]

    def run(x, which):
        z0 = m[0](x)
        h = torch.tanh(z0)
        z2 = m[2](h)
        return m[4](torch.tanh(z2)), {"0": [(x, z0)], "2": [(h, z2)], "both": [(x, z0), (h, z2)]}[which]
    for which in ("0", "2"):
        check(rep["0"].uses[which], brute(lambda x: run(x, which), m[0].weight, X, Y, mse, .1), QS[2:])
    check(rep["0"], brute(lambda x: run(x, "both"), m[0].weight, X, Y, mse, .1), QS[:2])


def test_inplace_activations_and_sequences():
    with seeded(9):
        a = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 2)).double()
        X, Y = torch.randn(5, 2, 3).double(), torch.randint(2, (5,))
    b = copy.deepcopy(a)
    for mod in b:
        if isinstance(mod, nn.ReLU): mod.inplace = False             # noqa: E701
    r, s = (measure(m, ce, batches(X, Y), .1) for m in (a, b))
    for k in r.layers:
        for q in QS: assert rel_err(getattr(s[k], q), getattr(r[k], q)) < 1e-12   # noqa: E701


# ---------------------------------------------------------------- a measure that is wrong is caught

def test_brute_force_tells_fact_from_agop_and_noise():
    with seeded(10):
        m, X, Y = Twice().double(), torch.randn(7, 3).double(), torch.randn(7, 2).double()
    rep = measure(m, mse, batches(X, Y), .1)

    def run(x):
        tape = []
        return m(x, tape), tape
    acc = brute(run, m.rec.weight, X, Y, mse, .1)
    layer = rep["rec"]
    good = layer.fact
    for wrong in (layer.agop, torch.randn_like(good), good.T, good * 1.001):
        layer.held["fact"] = wrong
        with pytest.raises(AssertionError): check(layer, acc, ["fact"])   # noqa: E701
    layer.held["fact"] = good
    check(layer, acc, ["fact"])
    assert cosine(layer.agop, good) < .99
