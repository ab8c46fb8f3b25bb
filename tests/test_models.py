"""`measure` on architectures that people train: every matrix, and against a brute force that imports only torch.

Two layers of each are compared sample by sample, output by output, in float64. Libraries are optional: what is not installed is skipped."""
import importlib
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fact_nb.linalg import rel_err
from fact_nb.networks.measure import measure
from fact_nb.networks.quantities import Source
from fact_nb.networks.report import Report
from fact_nb.runtime import seeded

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
pytestmark = pytest.mark.filterwarnings("ignore")
ce = F.cross_entropy
QS = ("fact", "bfact", "agop", "bagop", "enfa", "benfa")
LAM = .1


# ---------------------------------------------------------------- the reference

def outer(a, b): return a[:, None] * b[None, :]


def brute(run, module, W, n, weights=None):
    """Sums over samples, positions and outputs at the output z = W h of a module.

    run(i) → (output of sample i alone, its mean loss). weights: what the loss of the data averages over, by sample.
    G is Σ w ∇ℓ / Σ w, the gradient of the whole objective with respect to z·hᵀ, so FACT is taken from (h, g) pairs.
    """
    w = torch.ones(n) if weights is None else torch.tensor(weights, dtype=torch.float64)
    scale = (w / w.sum() * n).tolist()                      # Σ scale_i ℓ_i / n is the loss of the data
    acc = {q: 0. for q in QS}
    for i in range(n):
        tape = []
        hook = module.register_forward_hook(lambda m, a, z: tape.append((a[0], z if isinstance(z, torch.Tensor) else z[0])))
        f, loss = run(i)
        hook.remove()
        zs = [z for _, z in tape]
        rows = lambda t: t.reshape(-1, t.shape[-1])
        for (h, z), g in zip(tape, torch.autograd.grad(loss * scale[i], zs, retain_graph=True)):
            if not h.is_floating_point(): h = F.one_hot(h, W.shape[1]).double()
            if h.shape[:-1] != g.shape[:-1]: continue
            for hp, gp in zip(rows(h.detach()), rows(g)):
                u = W.T @ gp
                acc["fact"] = acc["fact"] - outer(u, hp) / (n * LAM)
                acc["bfact"] = acc["bfact"] - outer(W @ hp, gp) / (n * LAM)
                acc["enfa"] = acc["enfa"] + outer(u, u) / n
                acc["benfa"] = acc["benfa"] + outer(gp, gp) / n
        for v in f.reshape(-1):
            for J in torch.autograd.grad(v, zs, retain_graph=True, allow_unused=True):
                for jp in rows(J) if J is not None else ():
                    acc["agop"] = acc["agop"] + outer(W.T @ jp, W.T @ jp) / n
                    acc["bagop"] = acc["bagop"] + outer(jp, jp) / n
    return acc


def check(use, acc, qs=QS, tol=1e-8):
    for q in qs:
        assert rel_err(acc[q], getattr(use, q)) < tol, (use.name, q, rel_err(acc[q], getattr(use, q)))


def prepared(model, std=.4):
    "In float64 and in evaluation mode, with weights that are not tiny."
    with seeded(1):
        for p in model.parameters():
            if p.ndim > 1: nn.init.normal_(p, std=std)
    return model.double().eval()


def coverage(model, rep, names=("agop", "enfa")):
    "Share of the entries of trained parameters with two or more axes that have FACT; that have all of names at some use."
    total = sum(p.numel() for p in model.parameters() if p.ndim > 1 and p.requires_grad)
    layers = [v for v in rep.entries.values() if not v.frozen]
    both = lambda u: all(u.has(q) or u.has("b" + q) for q in names)
    fact = sum(v.W.numel() for v in layers if v.has("fact") or v.has("bfact"))
    seen = sum(v.W.numel() for v in layers if any(map(both, v.uses.values())))
    return fact / total, seen / total


class Double(TorchFunctionMode):
    "Models that go through float32 on their way (root mean squares, softmax, routers) do so in float64."
    def __torch_function__(self, func, types, args=(), kwargs=None):
        swap = lambda v: torch.float64 if v is torch.float32 else v
        if func is torch.Tensor.float: func = torch.Tensor.double
        return func(*map(swap, args), **{k: swap(v) for k, v in (kwargs or {}).items()})


# ---------------------------------------------------------------- Hugging Face, the call of the documentation

B, T, V = 3, 4, 11


def words():
    with seeded(0): ids = torch.randint(3, V, (B, T))
    labels = ids.clone()
    labels[0, -1] = labels[1, 1] = -100
    return ids, labels


def language(name):
    tf = pytest.importorskip("transformers")
    ids, labels = words()
    small = dict(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=12, vocab_size=V)
    grouped = small | dict(num_key_value_heads=2)
    ends = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    make = dict(
        gpt2=lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=V, n_positions=8, bos_token_id=1, eos_token_id=2)),
        bert=lambda: tf.BertForMaskedLM(tf.BertConfig(**small, max_position_embeddings=8)),
        llama=lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**grouped)),
        qwen3=lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**grouped, head_dim=4)),
        mixtral=lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**grouped, num_local_experts=4, experts_implementation="eager")),
        mamba=lambda: tf.MambaForCausalLM(tf.MambaConfig(num_hidden_layers=2, hidden_size=16, state_size=2, vocab_size=V)),
        t5=lambda: tf.T5ForConditionalGeneration(tf.T5Config(num_layers=2, d_model=8, d_kv=4, d_ff=12, num_heads=2, vocab_size=V, decoder_start_token_id=0,
                                                             relative_attention_num_buckets=4)),
        whisper=lambda: tf.WhisperForConditionalGeneration(tf.WhisperConfig(
            vocab_size=V, num_mel_bins=4, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, d_model=8,
            encoder_ffn_dim=12, decoder_ffn_dim=12, max_source_positions=4, max_target_positions=8, decoder_start_token_id=1, **ends)))
    with seeded(0): model, sound = prepared(make[name]()), torch.randn(B, 4, 8)
    batch = dict(input_features=sound, labels=labels) if name == "whisper" else dict(input_ids=ids, labels=labels)
    return model, batch


# name → two layers, and whether the labels are shifted inside
LANGUAGE = {
    "gpt2": (["transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj"], True),
    "bert": (["bert.encoder.layer.0.attention.self.query", "bert.encoder.layer.1.intermediate.dense"], False),
    "llama": (["model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"], True),
    "qwen3": (["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"], True),
    "mixtral": (["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.k_proj"], True),
    "mamba": (["backbone.layers.0.mixer.in_proj", "backbone.layers.1.mixer.out_proj"], True),
    "t5": (["encoder.block.0.layer.0.SelfAttention.q", "decoder.block.1.layer.1.EncDecAttention.v"], False),
    "whisper": (["model.encoder.layers.0.fc1", "model.decoder.layers.1.encoder_attn.k_proj"], False)}


def word_loss(shift):
    "The loss of a language model in the precision of its output; Hugging Face computes its own in float32."
    cut = (lambda f, y: (f[:, :-1], y[:, 1:])) if shift else (lambda f, y: (f, y))
    return lambda f, y: (lambda a, b: ce(a.flatten(0, 1), b.flatten()))(*cut(f, y))


def alone(model, batch, shift):
    "Sample i → its output and its loss in float64."
    def run(i):
        one = {k: v[i:i + 1].double() if v.is_floating_point() else v[i:i + 1] for k, v in batch.items()}
        f = model(**one).logits
        return f, word_loss(shift)(f, one["labels"])
    return run


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models(name):
    "measure(model, loader, weight_decay): everything is measured, the weights of batches are found, two layers equal brute force."
    model, batch = language(name)
    layers, shift = LANGUAGE[name]
    parts = [{k: v[i:j] for k, v in batch.items()} for i, j in ((0, 2), (2, B))]   # unequal batches
    own = measure(model, parts, weight_decay=LAM)
    with Double(): rep = measure(model, word_loss(shift), parts, LAM)
    fact, agop = coverage(model, own)
    assert fact == 1 and agop >= .95, (fact, agop, rep.skipped)
    y = batch["labels"][:, 1:] if shift else batch["labels"]
    counts = (y != -100).sum(1).tolist()
    for r in (own, rep): assert ("shifted labels" if shift else "their labels") in r.notes[-1]
    for k in layers:
        module = model.get_submodule(k)
        W = rep[k].W
        assert torch.equal(W, module.weight.T if "c_" in k else module.weight)
        with Double(): acc = brute(alone(model, batch, shift), module, W, B, counts)
        check(rep[k], acc)
        check(own[k], acc, tol=1e-5)                                               # the model's own loss, in float32


def test_mixture_of_experts_has_one_matrix_per_expert():
    "Eager experts and grouped products agree; a router is an ordinary matrix."
    model, batch = language("mixtral")
    rep = measure(model, [batch], weight_decay=LAM)
    stack = model.model.layers[0].mlp.experts.gate_up_proj
    names = [k for k in rep.layers if k.startswith("model.layers.0.mlp.experts.gate_up_proj")]
    assert names == [f"model.layers.0.mlp.experts.gate_up_proj[{i}]" for i in range(4)]
    for i, k in enumerate(names): assert torch.equal(rep[k].W, stack[i])
    assert rep["model.layers.0.mlp.gate"].agop.norm() > 0
    tf = pytest.importorskip("transformers")
    grouped = tf.MixtralForCausalLM(tf.MixtralConfig(**{**model.config.to_dict(), "experts_implementation": "grouped_mm"}))
    grouped.load_state_dict(model.state_dict())
    fast = measure(grouped.float().eval(), [batch], weight_decay=LAM)
    assert fast.layers == rep.layers
    for k in names:
        reached = rep[k].fact.norm() > 0                                           # some token that counts went to this expert
        assert reached == (fast[k].fact.norm() > 0)
        for q in ("fact", "agop", "enfa") if reached else ():
            assert rel_err(getattr(rep[k], q), getattr(fast[k], q)) < 1e-4, (k, q)


def test_vision_transformer():
    tf = pytest.importorskip("transformers")
    with seeded(0):
        model = prepared(tf.ViTForImageClassification(tf.ViTConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=12, image_size=8,
                                                                   patch_size=4, num_labels=3)))
        X, y = torch.randn(4, 3, 8, 8).double(), torch.tensor([0, 1, 2, 1])
    rep = measure(model, [dict(pixel_values=X[:3], labels=y[:3]), dict(pixel_values=X[3:], labels=y[3:])], weight_decay=LAM)
    fact, agop = coverage(model, rep)
    assert fact == 1 and agop >= .95
    assert rep["vit.embeddings.position_embeddings"].W.shape == (8, 5)             # read like an embedding
    run = lambda i: (lambda out: (out.logits, out.loss))(model(pixel_values=X[i:i + 1], labels=y[i:i + 1]))
    blocks = [k for k in rep.layers if k.endswith(("attention.query", "q_proj", "fc1", "intermediate.dense"))]
    for k in (blocks[0], blocks[-1]): check(rep[k], brute(run, model.get_submodule(k), rep[k].W, 4))


def test_contrastive_loss_is_told_and_its_enfa_refused():
    tf = pytest.importorskip("transformers")
    ids, _ = words()
    tower = dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=12)
    with seeded(0):
        model = prepared(tf.CLIPModel(tf.CLIPConfig(text_config=tower | dict(vocab_size=V, max_position_embeddings=8, eos_token_id=2, bos_token_id=1, pad_token_id=0),
                                                    vision_config=tower | dict(image_size=8, patch_size=4), projection_dim=6)))
        batch = dict(input_ids=ids, pixel_values=torch.randn(B, 3, 8, 8))
    with pytest.warns(UserWarning, match="contrastive"): rep = measure(model, [batch], weight_decay=LAM)
    assert coverage(model, rep, ["agop"]) == (1, 1)
    with pytest.raises(ValueError, match="interact, and the loss of a batch is not a mean"): rep["text_projection"].enfa
    wide = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    for layer in ("text_projection", "visual_projection"):
        W, z = model.get_submodule(layer).weight, []
        hook = model.get_submodule(layer).register_forward_hook(lambda m, a, out: z.append(out))
        out = model(**wide, return_loss=True)
        hook.remove()
        J = torch.cat([torch.autograd.grad(v, z[0], retain_graph=True)[0] for v in out.logits_per_image.reshape(-1)])
        assert rel_err(J.T @ J / B, rep[layer].bagop) < 1e-8
        G, = torch.autograd.grad(out.loss, W)
        assert rel_err(-(W.T @ G / LAM).detach(), rep[layer].fact) < 1e-8
        assert rel_err(rep[layer].nfm, W.T @ W) < 1e-12


@pytest.mark.parametrize("name,layer", [("bert", "bert.embeddings.position_embeddings"), ("t5", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"),
                                        ("gpt2", "transformer.wpe")])
def test_layers_that_run_once_and_are_broadcast(name, layer):
    "Their rows belong to all samples: formed sample by sample they equal brute force."
    model, batch = language(name)
    shift = name == "gpt2"
    own = measure(model, [batch], weight_decay=LAM)
    with Double(): rep = measure(model, word_loss(shift), [batch], LAM)
    counts = ((batch["labels"][:, 1:] if shift else batch["labels"]) != -100).sum(1).tolist()
    module = model.get_submodule(layer)
    assert any("interact or share rows" in s and layer in s for s in rep.notes)
    with Double(): acc = brute(alone(model, batch, shift), module, module.weight.T.detach(), B, counts)
    check(rep[layer], acc, ("bagop", "benfa"))
    check(own[layer], acc, ("bagop", "benfa"), tol=1e-5)


class Queries(nn.Module):
    "Learned queries go through layers of their own, once for the whole batch, and are broadcast to every sample."
    def __init__(self):
        super().__init__()
        self.queries, self.place = nn.Parameter(torch.randn(3, 4)), nn.Embedding(5, 4)
        self.once, self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        q = torch.tanh(self.once(self.queries))                                    # 3 × 4: no axis of samples
        h = torch.tanh(self.key(x + self.place(torch.arange(x.shape[1]))))
        return self.out(torch.softmax(q @ h.mT, -1) @ h).mean(1)


def test_learned_queries_and_a_layer_that_runs_once():
    "Both mix samples: told, and equal to brute force, whatever the size of the batches."
    with seeded(0): net, x, y = prepared(Queries()), torch.randn(6, 5, 4).double(), torch.randint(3, (6,))
    with pytest.warns(UserWarning, match="interact or share rows in .*once"): rep = measure(net, ce, [(x, y)], LAM)
    assert coverage(net, rep)[0] == 1
    by_two = measure(net, ce, list(zip(x.split(2), y.split(2))), LAM)
    run = lambda i: (lambda f: (f, ce(f, y[i:i + 1])))(net(x[i:i + 1]))
    for k, qs in (("once", QS), ("key", QS), ("place", ("bagop", "benfa", "bfact"))):
        module = net.get_submodule(k)
        acc = brute(run, module, rep[k].W, 6)
        for r in (rep, by_two): check(r[k], acc, qs)
    G = torch.autograd.grad(ce(net(x), y), net.queries)[0]
    W = net.queries.detach()
    assert rel_err(-W.T @ G / LAM, rep["queries"].fact) < 1e-12                    # it is no W h: FACT alone
    with pytest.raises(ValueError, match="not seen from outside"): rep["queries"].agop


def test_a_gradient_that_two_weights_share_is_not_counted_twice():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

        def forward(self, x): return F.linear(x, self.a + self.b)

    with seeded(0): net, x, y = prepared(Sum()), torch.randn(7, 4).double(), torch.randint(3, (7,))
    G = torch.autograd.grad(ce(net(x), y), net.a)[0]
    for batches in ([(x, y)], list(zip(x.split(3), y.split(3)))):
        rep = measure(net, ce, batches, LAM)
        for k in "ab": assert rel_err(-getattr(net, k).T @ G / LAM, rep[k].fact) < 1e-12


def test_adapters():
    "LoRA: the adapters are trained, the base is frozen, and the product B A is seen as two layers."
    peft = pytest.importorskip("peft")
    model, batch = language("gpt2")
    lora = prepared(peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)))
    rep = measure(lora, word_loss(True), [batch], LAM)
    assert coverage(lora, rep) == (1, 1)
    frozen = [k for k in rep.layers if rep[k].frozen]
    assert frozen and all("lora" not in k for k in frozen)
    A = next(k for k in rep.layers if "lora_A" in k)
    counts = (batch["labels"][:, 1:] != -100).sum(1).tolist()
    check(rep[A], brute(alone(lora, batch, True), lora.get_submodule(A), rep[A].W, B, counts))


# ---------------------------------------------------------------- graphs

@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "SAGEConv"])
def test_graph_networks(name):
    "Nodes interact: AGOP is exact by a pass for each node and output, eNFA by a pass for each node."
    geo = pytest.importorskip("torch_geometric.nn")
    conv = getattr(geo, name)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = conv(40, 40), conv(40, 3)

        def forward(self, x, edges): return self.b(torch.tanh(self.a(x, edges)), edges)

    with seeded(0):
        net = prepared(Net(), .2)
        x, y = torch.randn(7, 40).double(), torch.randint(3, (7,))
        edges = torch.randint(7, (2, 14))
    rep = measure(net, ce, [((x, edges), y)], LAM, forward=lambda b: (net(*b[0]), b[1]))
    fact, agop = coverage(net, rep)
    assert fact == 1 and agop >= .95, (fact, agop)                # GAT's attention vectors scale, they do not multiply
    assert any("interact" in s for s in rep.notes)

    def run(i):
        f = net(x, edges)
        return f[i:i + 1], ce(f[i:i + 1], y[i:i + 1])
    kinds = {k for k in rep.layers if k.startswith(("a.lin", "b.lin"))}
    for k in sorted(kinds)[:2]:
        check(rep[k], brute(run, net.get_submodule(k), rep[k].W, 7), ("agop", "bagop", "enfa", "benfa"))
        G = torch.autograd.grad(ce(net(x, edges), y), net.get_submodule(k).weight)[0]
        assert rel_err(-rep[k].W.T @ G / LAM, rep[k].fact) < 1e-12


# ---------------------------------------------------------------- timm, convolutions sample by sample

def brute_conv(net, x, y, module, group=0):
    "The reference for a convolution: patches by unfold, the weight as the module's forward computes it."
    n, found = len(x), {q: 0. for q in QS[2:]}
    for i in range(n):
        tape = []

        class Tape(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                z = func(*args, **(kwargs or {}))
                if func is not torch.conv2d or not tape_on: return z
                tape.append((args[1], z))
                return z.clone()                                                   # an activation in place would change z
        tape_on = []
        hooks = [module.register_forward_pre_hook(lambda *a: tape_on.append(1)), module.register_forward_hook(lambda *a: tape_on.clear())]
        with Tape(): f = net(x[i:i + 1])
        for hook in hooks: hook.remove()
        (W, z), = tape
        out = len(W) // module.groups
        rows = lambda t: t.movedim(1, -1).reshape(-1, z.shape[1])[:, out * group:out * group + out]
        W = W.detach()[out * group:out * group + out].flatten(1)
        for g in rows(torch.autograd.grad(ce(f, y[i:i + 1]), z, retain_graph=True)[0]):
            found["enfa"], found["benfa"] = found["enfa"] + outer(W.T @ g, W.T @ g) / n, found["benfa"] + outer(g, g) / n
        for v in f.reshape(-1):
            for j in rows(torch.autograd.grad(v, z, retain_graph=True)[0]):
                found["agop"], found["bagop"] = found["agop"] + outer(W.T @ j, W.T @ j) / n, found["bagop"] + outer(j, j) / n
    return found


def timm_model(name):
    "A small model of a family of timm, and two of its layers."
    pytest.importorskip("timm", exc_type=ImportError)
    from timm.models import convnext, mlp_mixer, nfnet, resnet
    make = dict(
        resnet=lambda: resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], channels=(4, 4, 8, 8), stem_width=4, num_classes=3),
        convnext=lambda: convnext.ConvNeXt(depths=(1, 1, 1, 1), dims=(4, 4, 8, 8), num_classes=3),
        mixer=lambda: mlp_mixer.MlpMixer(num_classes=3, img_size=32, patch_size=16, num_blocks=2, embed_dim=8),
        nf_resnet=lambda: nfnet.NormFreeNet(nfnet.NfCfg(depths=(1, 1, 1, 1), channels=(16, 16, 32, 32), stem_type="7x7_pool", stem_chs=8), num_classes=3))
    layers = dict(resnet=["layer1.0.conv2", "layer4.0.conv1"], convnext=["stages.1.downsample.1", "stages.2.blocks.0.mlp.fc1"],
                  mixer=["blocks.0.mlp_tokens.fc1", "blocks.1.mlp_channels.fc2"], nf_resnet=["stages.0.0.conv2", "stages.3.0.conv1"])
    with seeded(0):
        model = make[name]()
        for p in model.parameters(): nn.init.normal_(p, 1., .2)                    # some start at zero, and stop the gradient
    return prepared(model, .2), layers[name]


@pytest.mark.parametrize("name", ["resnet", "convnext", "mixer", "nf_resnet"])
def test_timm(name):
    model, layers = timm_model(name)
    with seeded(1): x, y = torch.randn(3, 3, 32, 32).double(), torch.tensor([0, 1, 2])
    rep = measure(model, ce, [(x[:2], y[:2]), (x[2:], y[2:])], LAM)
    fact, agop = coverage(model, rep)
    assert fact == 1 and agop >= .95, (fact, agop)
    L = ce(model(x), y)
    for k in layers:
        module = model.get_submodule(k)
        W, G = module.weight.detach().flatten(1), torch.autograd.grad(L, module.weight, retain_graph=True)[0].flatten(1)
        assert rel_err(-W.T @ G / LAM, rep[k].fact) < 1e-8 and rel_err(-W @ G.T / LAM, rep[k].bfact) < 1e-8
        use = next(iter(rep[k].uses.values()))
        if isinstance(module, nn.Conv2d):
            check(use, brute_conv(model, x, y, module), QS[2:])
        else:
            run = lambda i: (lambda f: (f, ce(f, y[i:i + 1])))(model(x[i:i + 1]))
            check(use, brute(run, module, rep[k].W, 3), QS[2:])


# ---------------------------------------------------------------- layers whose product is fused, computed or bare

class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.head = kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x): return self.head(self.rnn(x)[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind):
    with seeded(0): net, x, y = prepared(Recurrent(kind)), torch.randn(6, 4, 4).double(), torch.randint(3, (6,))
    rep = measure(net, ce, [(x[:4], y[:4]), (x[4:], y[4:])], LAM)
    assert coverage(net, rep)[0] == 1
    L = ce(net(x), y)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        p = getattr(net.rnn, name)
        G = torch.autograd.grad(L, p, retain_graph=True)[0]
        layer = rep[f"rnn.{name}"]
        assert rel_err(-p.T @ G / LAM, layer.fact) < 1e-12 and rel_err(-p @ G.T / LAM, layer.bfact) < 1e-12
        assert abs(layer.residual - rel_err(p.T @ p, -p.T @ G / LAM)) < 1e-12
        with pytest.raises(ValueError, match=f"not seen from outside .{kind.__name__}."): layer.agop


class Standard(nn.Conv2d):
    "Weight standardisation, as in networks without normalisation."
    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


def test_a_computed_weight_is_measured_through_what_it_is_computed_from():
    with seeded(0):
        net = prepared(nn.Sequential(Standard(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(27, 3))))
        x, y = torch.randn(4, 2, 4, 4).double(), torch.randint(3, (4,))
    rep = measure(net, ce, [(x, y)], LAM)
    assert coverage(net, rep)[0] == 1
    conv, direction = rep["0"], rep["3.parametrizations.weight.original1"]
    assert conv.scale_invariant and direction.scale_invariant                      # read from ⟨W, G⟩
    assert list(conv.uses) == ["0 as computed"]
    z = net[0](x)
    f = net[1:](z)
    J = [torch.autograd.grad(v, z, retain_graph=True)[0].movedim(1, -1).reshape(-1, 3) for v in f.reshape(-1)]
    use = conv.uses["0 as computed"]
    assert rel_err(sum(j.T @ j for j in J) / 4, use.bagop) < 1e-12
    w = net[0].weight.detach()
    standard = ((w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)).flatten(1)
    assert rel_err(standard.T @ use.bagop @ standard, use.agop) < 1e-12


class Bare(nn.Module):
    "Every way to multiply by a bare parameter."
    def __init__(self):
        super().__init__()
        self.right, self.left = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(6, 5))
        self.heads, self.add = nn.Parameter(torch.randn(2, 3, 6)), nn.Parameter(torch.randn(6, 3))
        self.sliced, self.tied = nn.Parameter(torch.randn(6, 6)), nn.Linear(3, 3)

    def forward(self, x, tape=None):
        note = tape.append if tape is not None else lambda pair: None
        h = torch.tanh(z1 := x @ self.right)
        note(("right", self.right.T, x, z1))
        z2 = torch.matmul(self.left, h.mT).mT
        note(("left", self.left, h, z2))
        h = torch.tanh(z2)
        z3 = torch.einsum("hkd,btd->bthk", self.heads, h).flatten(2)
        note(("heads", self.heads.flatten(0, 1), h, z3))
        h = torch.tanh(z3)
        z4 = F.linear(h, self.sliced[:4, :6])
        note(("sliced", self.sliced[:4], h, z4))
        flat = torch.tanh(torch.cat([z4, h[..., :2]], -1)).flatten(0, 1)
        z5 = torch.addmm(torch.ones(3).double(), flat, self.add).reshape(*x.shape[:2], 3)
        note(("add", self.add.T, flat, z5))
        z6 = self.tied(torch.tanh(z5))
        z7 = torch.tanh(z6) @ self.tied.weight.T                  # the layer's weight once more, through @
        note(("tied", self.tied.weight, torch.tanh(z5), z6))
        note(("tied", self.tied.weight, torch.tanh(z6), z7))
        return z7.mean(1)


def test_bare_parameters_through_every_product():
    with seeded(0): net, x, y = prepared(Bare(), .5), torch.randn(5, 3, 4).double(), torch.randint(3, (5,))
    rep = measure(net, ce, [(x[:3], y[:3]), (x[3:], y[3:])], LAM)
    assert coverage(net, rep) == (1, 1)
    for name in ("right", "left", "heads", "add", "tied", "sliced"):
        acc = {q: 0. for q in QS}
        for i in range(5):
            tape = []
            f = net(x[i:i + 1], tape)
            pairs = [(W.detach(), h, z) for k, W, h, z in tape if k == name]
            zs = [z for _, _, z in pairs]
            for (W, h, z), g in zip(pairs, torch.autograd.grad(ce(f, y[i:i + 1]), zs, retain_graph=True)):
                h, g = h.detach().reshape(-1, h.shape[-1]), g.reshape(-1, g.shape[-1])
                acc["fact"] = acc["fact"] - W.T @ g.T @ h / (5 * LAM)
                acc["bfact"] = acc["bfact"] - W @ h.T @ g / (5 * LAM)
                acc["enfa"] = acc["enfa"] + W.T @ g.T @ g @ W / 5
                acc["benfa"] = acc["benfa"] + g.T @ g / 5
            for v in f.reshape(-1):
                for W, J in zip((p[0] for p in pairs), torch.autograd.grad(v, zs, retain_graph=True)):
                    J = J.reshape(-1, J.shape[-1])
                    acc["agop"] = acc["agop"] + W.T @ J.T @ J @ W / 5
                    acc["bagop"] = acc["bagop"] + J.T @ J / 5
        if name == "sliced":
            check(rep["sliced"].uses["sliced[0:4, 0:6]"], acc, QS[2:])
        else:
            check(rep[name], acc)


class Added(nn.Module):
    "c + a @ b with a bare weight, its arguments by place or by name."
    SPELLINGS = (
        lambda c, h, w: torch.addmm(c, h, w),
        lambda c, h, w: torch.addmm(c, h, mat2=w),
        lambda c, h, w: torch.addmm(c, mat1=h, mat2=w),
        lambda c, h, w: torch.baddbmm(c, h[None], w[None])[0],
        lambda c, h, w: torch.baddbmm(c, h[None], batch2=w[None])[0],
        lambda c, h, w: torch.baddbmm(c, batch1=h[None], batch2=w[None])[0])

    def __init__(self, spelling):
        super().__init__()
        with seeded(0): self.w, self.spelling = nn.Parameter(torch.randn(4, 3).double()), spelling

    def forward(self, x): return self.spelling(torch.ones(3).double(), x, self.w)


@pytest.mark.parametrize("spelling", Added.SPELLINGS)
def test_every_spelling_of_a_sum_with_a_product_is_seen(spelling):
    with seeded(1): x, y = torch.randn(6, 4).double(), torch.randint(3, (6,))
    rep, plain = (measure(Added(f), ce, [(x, y)], LAM) for f in (spelling, Added.SPELLINGS[0]))
    assert rep.layers == ["w"] and rel_err(rep["w"].fact, plain["w"].fact) < 1e-14
    assert rel_err(rep["w"].agop, plain["w"].agop) < 1e-14


def test_heads_and_fused_projections_are_split():
    model, batch = language("gpt2")
    whole = measure(model, [batch], weight_decay=LAM)
    rep = measure(model, [batch], weight_decay=LAM, split={"*.c_attn": 3})
    k = "transformer.h.0.attn.c_attn"
    assert [f"{k}[{i}]" in rep.layers for i in range(3)] == [True] * 3
    fused = whole[k]
    for i in range(3):
        rows = slice(8 * i, 8 * i + 8)
        assert rel_err(fused.bagop[rows, rows], rep[f"{k}[{i}]"].bagop) < 1e-12
        assert rel_err(-fused.W[rows].T @ fused.G[rows] / LAM, rep[f"{k}[{i}]"].fact) < 1e-12
    heads = measure(model, [batch], weight_decay=LAM, split={"*.c_attn": 6}, layers="*.h.1.*")
    assert f"{k}[0]".replace("h.0", "h.1") in heads.layers and not any(".h.0." in n for n in heads.layers)


# ---------------------------------------------------------------- wrong numbers of the past, one by one

def test_batch_norm_in_training_mode():
    with seeded(0):
        net = prepared(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)))
        x, y = torch.randn(8, 4).double(), torch.randint(3, (8,))
    rep = measure(net, ce, [(x, y)], LAM, mode="train")
    net.train()
    z = net[0](x)
    f = net[1:](z)
    J = torch.cat([torch.autograd.grad(v, z, retain_graph=True)[0] for v in f.reshape(-1)])
    g = torch.cat([torch.autograd.grad(ce(f[i:i + 1], y[i:i + 1]), z, retain_graph=True)[0] for i in range(8)])
    assert rel_err(J.T @ J / 8, rep["0"].bagop) < 1e-10 and rel_err(g.T @ g / 8, rep["0"].benfa) < 1e-10
    many = measure(net, ce, [(x, y)], LAM, mode="train", agop="sketch", probes=4000)
    assert rel_err(rep["0"].bagop, many["0"].bagop) < .05
    few = measure(net, ce, [(x, y)], LAM, mode="train", passes=7)                    # 8 samples are more than 7 passes
    assert few["0"].stderr["agop"] > 0
    with pytest.raises(ValueError, match="8 samples of a batch are more than passes=7"): few["0"].benfa


def test_sequence_first_models():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.), nn.Linear(4, 3)

        def forward(self, x): return self.head(self.layer(x))

    with seeded(0): net, x, y = prepared(First()), torch.randn(5, 2, 4).double(), torch.randint(3, (5, 2))
    loss = lambda f, y: ce(f.reshape(-1, 3), y.reshape(-1))
    with pytest.warns(UserWarning, match="second axis"): rep = measure(net, loss, [(x, y)], LAM)
    assert rep.n == 2
    turned = lambda b: (net(b[0].transpose(0, 1)).transpose(0, 1), b[1])
    batch_first = measure(net, loss, [(x.transpose(0, 1), y.T)], LAM, forward=turned)
    for k in rep.layers:
        for q in QS: assert rel_err(getattr(batch_first[k], q), getattr(rep[k], q)) < 1e-10, (k, q)


def test_a_head_tied_through_matmul_is_a_use():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.mid = nn.Embedding(7, 4), nn.Linear(4, 4)

        def forward(self, x): return torch.tanh(self.mid(self.emb(x))) @ self.emb.weight.T

    with seeded(0): net, x, y = prepared(Tied()), torch.randint(7, (5, 3)), torch.randint(7, (5, 3))
    loss = lambda f, y: ce(f.reshape(-1, 7), y.reshape(-1))
    rep = measure(net, loss, [(x, y)], LAM)
    assert list(rep["emb"].uses) == ["emb", "emb as linear"]
    by_linear = measure(net, loss, [(x, y)], LAM, forward=lambda b: (F.linear(torch.tanh(net.mid(net.emb(b[0]))), net.emb.weight), b[1]))
    for q in ("agop", "enfa"):
        assert rel_err(getattr(by_linear["emb"].uses["emb as linear"], q), getattr(rep["emb"].uses["emb as linear"], q)) < 1e-12


@pytest.mark.parametrize("shift", [False, True])
def test_padded_batches_weigh_what_their_loss_averages_over(shift):
    with seeded(0):
        net = prepared(nn.Sequential(nn.Embedding(7, 4), nn.Tanh(), nn.Linear(4, 7)))
        x, y = torch.randint(7, (6, 5)), torch.randint(7, (6, 5))
        y[torch.rand(6, 5) < .5] = -100
    cut = (lambda f, y: (f[:, :-1], y[:, 1:])) if shift else (lambda f, y: (f, y))
    loss = lambda f, y: (lambda a, b: ce(a.flatten(0, 1), b.flatten()))(*cut(f, y))
    whole, rep = measure(net, loss, [(x, y)], LAM), measure(net, loss, list(zip(x.split(2), y.split(2))), LAM)
    smooth = lambda f, y: (lambda a, b: ce(a.flatten(0, 1), b.flatten(), label_smoothing=.1))(*cut(f, y))   # not recognised, taken apart
    a, b = measure(net, smooth, [(x, y)], LAM), measure(net, smooth, list(zip(x.split(2), y.split(2))), LAM)
    for q in ("fact", "enfa"):
        assert rel_err(getattr(whole["2"], q), getattr(rep["2"], q)) < 1e-12
        assert rel_err(getattr(a["2"], q), getattr(b["2"], q)) < 1e-12


def test_a_sum_over_the_batch_is_refused():
    with seeded(0): net, x, y = prepared(nn.Linear(4, 3)), torch.randn(5, 4).double(), torch.randint(3, (5,))
    total = lambda f, y: ce(f, y, reduction="sum")
    with pytest.raises(ValueError, match="adds up over the batch"): measure(net, total, [(x, y)], LAM)
    one = measure(net, total, [(x, y)], LAM, weight=lambda f, y: 1)["model"]
    assert rel_err(5 * measure(net, ce, [(x, y)], LAM)["model"].fact, one.fact) < 1e-12


def test_scale_invariance_is_read_from_the_gradient():
    norms = dict(layer=nn.LayerNorm(6, eps=1e-12), rms=nn.RMSNorm(6, eps=1e-12), group=nn.GroupNorm(2, 6, eps=1e-12), none=nn.Identity())
    for name, norm in norms.items():
        with seeded(0):
            net = prepared(nn.Sequential(nn.Linear(4, 6, bias=False), norm, nn.Tanh(), nn.Linear(6, 3)))
            x, y = torch.randn(20, 4).double(), torch.randint(3, (20,))
        rep = measure(net, ce, [(x, y)], LAM)
        assert [rep[k].scale_invariant for k in rep.layers] == [name != "none", False], name
    model, batch = language("qwen3")
    rep = measure(model, [batch], weight_decay=LAM)
    invariant = [k for k in rep.layers if rep[k].scale_invariant]
    assert invariant == [f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qk"]      # query-key norm
    assert "scale invariant (4)" in rep.explain()


def test_targets_keep_the_precision_of_the_output():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 5).bfloat16(), nn.Linear(5, 3)

        def forward(self, x): return self.head(torch.tanh(self.body(x)).float())

    with seeded(0): net, x, y = Mixed(), torch.randn(9, 4), torch.randn(9, 3)
    rep = measure(net, F.mse_loss, [(x, y)], LAM)
    W = net.head.weight
    G = torch.autograd.grad(F.mse_loss(net(x.bfloat16()), y), W)[0]
    assert rel_err(-W.T @ G / LAM, rep["head"].fact) < 1e-6


# ---------------------------------------------------------------- batches and answers of other shapes; one line for each mistake

class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, left, right): return self.a(left) + self.b(right), left


def test_several_inputs_and_outputs():
    with seeded(0): net, left, right, y = prepared(TwoInputs()), torch.randn(6, 4).double(), torch.randn(6, 5).double(), torch.randint(3, (6,))
    first = lambda out, y: ce(out[0], y)
    rep = measure(net, first, [((left, right), y)], LAM)
    ref = measure(net, ce, [(left, right, y)], LAM, forward=lambda b: (net(*b[:2])[0], b[2]))
    dicts = measure(net, first, [dict(left=left, right=right, labels=y)], LAM)
    for other in (ref, dicts):
        for q in QS: assert rel_err(getattr(other["b"], q), getattr(rep["b"], q)) < 1e-12


def mistakes():
    net = prepared(nn.Linear(4, 3))
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    loader = [(x, y)]
    other = prepared(nn.Linear(4, 3))
    return {
        "no loss": (lambda: measure(net, loader, weight_decay=LAM), ValueError, "the model returns no .loss"),
        "no decay": (lambda: measure(net, ce, loader), TypeError, "weight_decay is missing"),
        "no loader": (lambda: measure(net, ce, weight_decay=LAM), TypeError, "loader is missing"),
        "loss is no function": (lambda: measure(net, 3, loader, LAM), TypeError, "must be a function"),
        "loss as output": (lambda: measure(net, lambda f, y: f, loader, LAM, forward=lambda b: (ce(net(b[0]), b[1]), b[1])), ValueError, "a single number"),
        "another model": (lambda: measure(net, ce, loader, LAM, forward=lambda b: (other(b[0]), b[1])), ValueError, "used no weight matrix of this model"),
        "keys": (lambda: measure(net, ce, [dict(ids=x, labels=y)], LAM), ValueError, "does not take the keys"),
        "layers": (lambda: measure(net, ce, loader, LAM, layers="mlp"), ValueError, "fits no weight matrix"),
        "split": (lambda: measure(net, ce, loader, LAM, split={"model": 2}), ValueError, "cannot be cut"),
        "passes": (lambda: measure(net, ce, loader, LAM, passes=0), ValueError, "passes must be a whole number"),
        "keep": (lambda: measure(net, ce, loader, LAM, keep="all"), ValueError, "keep must be one of")}


@pytest.mark.parametrize("fault", mistakes())
def test_a_mistake_gets_one_line(fault):
    call, kind, text = mistakes()[fault]
    with pytest.raises(kind, match=text) as e: call()
    assert "\n" not in str(e.value)


# ---------------------------------------------------------------- memory and disk

def test_summary_keeps_numbers_only(tmp_path):
    model, batch = language("llama")
    full, brief = (measure(model, [batch, batch], weight_decay=LAM, keep=k) for k in ("matrices", "summary"))
    assert all(v.W.is_meta and v.G is None and not v.uses for v in brief.entries.values())
    for s in ("pearson", "cosine"):
        a, b = full.table(s, wide=True, symmetrise=False), brief.table(s, wide=True)
        assert (a - b[list(a)]).abs().max().max() < 1e-12
    a, b = full.spectra(), brief.spectra()
    assert ((a - b).abs() / (1e-12 + b.abs())).fillna(0).max().max() < 1e-9
    assert list(full.verdicts().verdict) == list(brief.verdicts().verdict)
    for name, rep in (("full", full), ("brief", brief)):
        rep.save(tmp_path / f"{name}.npz")
        again = Report.load(tmp_path / f"{name}.npz")
        assert again.layers == rep.layers and again.explain() == rep.explain() and again.table().equals(rep.table())


def test_a_report_holds_each_weight_and_gradient_once():
    model, batch = language("gpt2")
    rep = measure(model, [batch], weight_decay=LAM, quantities=["nfm", "fact", "bfact", "bnfm"])
    rep.table(wide=True)
    tensors = [t for v in rep.entries.values() for t in (v.W, v.G, *v.held.values(), *(u.W for u in v.uses.values())) if t is not None]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    size = sum(p.numel() * 8 for p in model.parameters() if p.ndim > 1)
    assert sum(held.values()) == 2 * size                                           # W and G, nothing else


@pytest.mark.parametrize("batches,layers,each", [(1, None, 2), (2, None, 4), (2, "0", 4)])
def test_bytes_that_gradients_take(monkeypatch, batches, layers, each):
    "By count: one batch keeps gradients in the model's precision, several are added up in float32; layers= takes a part."
    module = importlib.import_module("fact_nb.networks.measure")
    finish, held = module._report, []

    def counted(run, skipped):
        kept = [G for G, _ in run.first.values()] + [S for slot, S in run.sums.items() if slot.source is Source.GRADIENT]
        held.append(sum(t.numel() * t.element_size() for t in kept))
        return finish(run, skipped)
    monkeypatch.setattr(module, "_report", counted)
    with seeded(0): net, x, y = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).bfloat16(), torch.randn(6, 8).bfloat16(), torch.randint(3, (6,))
    rep = measure(net, ce, list(zip(x.chunk(batches), y.chunk(batches))), LAM, quantities=["fact"], keep="summary", layers=layers)
    assert held == [each * sum(net.get_submodule(k).weight.numel() for k in rep.layers)]
    wide = measure(net.float(), ce, [(x.float(), y)], LAM, quantities=["fact"])
    assert abs(rep.table().loc["0", "FACT"] - wide.table().loc["0", "FACT"]) < .02


def test_tables_on_the_smaller_side_equal_the_definition():
    with seeded(0):
        net = prepared(nn.Sequential(nn.Linear(30, 6), nn.Tanh(), nn.Linear(6, 25), nn.Tanh(), nn.Linear(25, 3)))
        x, y = torch.randn(40, 30).double(), torch.randint(3, (40,))
    rep = measure(net, ce, [(x, y)], LAM)
    from fact_nb.linalg import cosine, pearson, psd_power, sym_sqrt
    for s, alike in (("pearson", pearson), ("cosine", cosine)):
        t = rep.table(s, wide=True)
        for k in rep.layers:
            lay = rep[k]
            want = {"FACT": lay.fact, "AGOP": lay.agop, "eNFA": lay.enfa, "√(FACT·FACTᵀ)": sym_sqrt(lay.fact), "FACTᵀ": lay.fact.T,
                    "AGOP^½": psd_power(lay.agop, .5, negative="clip")}
            for name, A in want.items(): assert abs(t.loc[k, name] - alike(lay.nfm, A)) < 1e-9, (k, name)
            for name, A in {"bFACT": lay.bfact, "bAGOP": lay.bagop, "√(bFACT·bFACTᵀ)": sym_sqrt(lay.bfact)}.items():
                assert abs(t.loc[k, name] - alike(lay.bnfm, A)) < 1e-9, (k, name)
            assert abs(t.loc[k, "r(FACT)"] - rel_err(lay.nfm, lay.fact)) < 1e-9 and abs(t.loc[k, "r(bFACT)"] - rel_err(lay.bnfm, lay.bfact)) < 1e-9


def test_error_bar_of_the_trace_ratio():
    "The standard error told from batches is that of many measurements on fresh data."
    with seeded(0): net = prepared(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    ratios, told = [], []
    for s in range(40):
        with seeded(s): x, y = torch.randn(60, 4).double(), torch.randint(3, (60,))
        layer = measure(net, ce, list(zip(x.split(6), y.split(6))), LAM, quantities=["fact"])["0"]
        ratios.append(layer.trace_ratio)
        told.append(layer.trace_error)
    seen, mean = torch.tensor(ratios).std(), torch.tensor(told).square().mean().sqrt()
    assert .7 < mean / seen < 1.4, (seen, mean)
