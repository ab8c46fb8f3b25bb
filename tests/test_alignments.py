"""The centred NFC and the canonical representation hypothesis, against a brute force that imports only torch."""
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fact_nb.linalg import cosine, pearson, rel_err
from fact_nb.networks.measure import measure
from fact_nb.networks.report import Report
from fact_nb.networks.watch import Watch
from fact_nb.runtime import seeded

pytestmark = pytest.mark.filterwarnings("ignore")
ASKED = ("enfa", "benfa", "agop", "bagop", "cagop", "hcov", "bhcov")
ce = F.cross_entropy


class Mixed(nn.Module):
    "An embedding, a convolution with groups, stride and dilation, a stack of experts, an einsum, a linear layer."
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 4, padding_idx=0)
        self.conv = nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2)
        self.experts = nn.Parameter(torch.randn(2, 6, 5))
        self.heads = nn.Parameter(torch.randn(2, 3, 5))
        self.out = nn.Linear(6, 3)

    def forward(self, words):
        h = torch.tanh(self.conv(self.emb(words).mT)).mT                                  # n × places × 6
        h = torch.tanh(torch.stack([h, h.flip(-1)], 1) @ self.experts).sum(1)             # n × places × 5
        h = torch.tanh(torch.einsum("hkd,btd->bthk", self.heads, h)).flatten(2)
        return self.out(h).mean(1)

    def rows(self, words):
        "The inputs of every product of one sample, a row each, written out in loops."
        e = self.emb(words)[0]
        found = {"emb": torch.stack([F.one_hot(w, 7).to(e) for w in words[0] if w])}
        padded = torch.cat([torch.zeros(2, 4).to(e), e, torch.zeros(2, 4).to(e)])
        for g in range(2):
            found[f"conv[{g}]"] = torch.stack([
                torch.stack([padded[p + 2 * k, 2 * g + c] for c in range(2) for k in range(3)])
                for p in range(0, len(padded) - 4, 2)])
        h = torch.tanh(self.conv(e.T[None]))[0].T
        found["experts[0]"], found["experts[1]"] = h, h.flip(-1)
        h = torch.tanh(h @ self.experts[0]) + torch.tanh(h.flip(-1) @ self.experts[1])
        found["heads"] = h
        found["out"] = torch.tanh(torch.stack([torch.cat([head @ v for head in self.heads]) for v in h]))
        return found


@pytest.fixture(scope="module")
def example():
    with seeded(0):
        model, words, y = Mixed().double(), torch.randint(7, (5, 6)), torch.randint(3, (5,))
    before = copy.deepcopy(model.state_dict())
    with seeded(1), torch.no_grad():
        for p in model.parameters(): p.add_(.5 * torch.randn_like(p))
        model.emb.weight[0] = 0
    return model, words, y, before


def measured(example, **kw):
    model, words, y, before = example
    batches = [(words[:2], y[:2]), (words[2:], y[2:])]
    return measure(model, ce, batches, .1, **(dict(quantities=ASKED, start=before, embedding="both") | kw))


def matrix(model, name, state=None):
    "W of an entry, from the parameters or from a state, written out."
    P = dict(model.named_parameters()) if state is None else state
    if name == "emb": return P["emb.weight"].detach().T
    if name.startswith("conv"): return P["conv.weight"].detach()[3 * int(name[5]):3 * int(name[5]) + 3].reshape(3, -1)
    if name.startswith("experts"): return P["experts"].detach()[int(name[8])].T
    if name == "heads": return P["heads"].detach().reshape(6, 5)
    return P["out.weight"].detach()


def test_inputs_of_every_kind_of_product(example):
    model, words, y, _ = example
    rep = measured(example)
    rows = [model.rows(words[i:i + 1]) for i in range(len(words))]
    for name in rows[0]:
        h = torch.cat([r[name] for r in rows]).detach()
        H = sum(torch.outer(v, v) for v in h) / len(h)
        W = matrix(model, name)
        use = rep[name] if name in rep.layers and not rep[name].shared else rep["heads"].uses["heads as linear"]
        assert rel_err(H, use.hcov) < 1e-12, name
        assert rel_err(W @ H @ W.T, use.bhcov) < 1e-12, name


def test_change_since_the_start(example):
    model, words, y, before = example
    rep = measured(example)
    for name in ("emb", "conv[0]", "conv[1]", "experts[0]", "experts[1]", "out"):
        D = matrix(model, name) - matrix(model, name, before)
        assert rel_err(D.T @ D, rep[name].cnfm) < 1e-12, name
        assert rel_err(D.T @ rep[name].bagop @ D, rep[name].cagop) < 1e-12, name
        assert abs(cosine(D.T @ D, rep[name].cagop) - rep.alignments().loc[name, "centred NFC"]) < 1e-10
        assert rel_err(rep[name].agop, rep[name].cagop) > .01          # the start matters


@pytest.mark.parametrize("kind,direct", [("cosine", cosine), ("pearson", pearson)])
def test_six_alignments_are_those_of_the_matrices(example, kind, direct):
    rep = measured(example)
    frame = rep.alignments(kind)
    pairs = {"WᵀW ~ ggᵀ": ("nfm", "enfa"), "WᵀW ~ hhᵀ": ("nfm", "hcov"), "hhᵀ ~ ggᵀ": ("hcov", "enfa"),
             "WWᵀ ~ ggᵀ": ("bnfm", "benfa"), "WWᵀ ~ zzᵀ": ("bnfm", "bhcov"), "zzᵀ ~ ggᵀ": ("bhcov", "benfa"),
             "NFC": ("nfm", "agop"), "centred NFC": ("cnfm", "cagop")}
    assert list(frame) == list(pairs)
    for name in ("emb", "conv[1]", "experts[0]", "out"):
        for column, (a, b) in pairs.items():
            truth = direct(getattr(rep[name], a), getattr(rep[name], b))
            assert abs(frame.loc[name, column] - truth) < 1e-9, (name, column)


def test_without_the_input_side_the_output_side_is_there(example):
    whole = measured(example)
    rep = measured(example, embedding="left")
    with pytest.raises(ValueError, match="V × V side"): rep["emb"].hcov
    assert rel_err(whole["emb"].bhcov, rep["emb"].bhcov) < 1e-12
    assert abs(whole.alignments() - rep.alignments()).loc["emb", ["WWᵀ ~ zzᵀ", "zzᵀ ~ ggᵀ"]].max() < 1e-10
    small = measured(example, max_dim=5)                                 # conv: d = 6, d' = 3
    assert "hcov" in small["conv[0]"].missing and rel_err(whole["conv[0]"].bhcov, small["conv[0]"].bhcov) < 1e-12


def test_summaries_and_files_keep_them(example, tmp_path):
    rep, brief = measured(example), measured(example, keep="summary")
    a, b = rep.alignments(), brief.alignments()
    assert (a.loc[b.index] - b).abs().max().max() < 1e-10
    rep.save(tmp_path / "rep.npz")
    again = Report.load(tmp_path / "rep.npz")
    assert torch.equal(again["out"].cagop, rep["out"].cagop) and torch.equal(again["out"].hcov, rep["out"].hcov)
    assert (again.alignments() - a).abs().max().max() == 0


def test_they_are_measured_only_on_demand(example):
    model, words, y, before = example
    usual = measure(model, ce, [(words, y)], .1)
    assert not {"cAGOP", "E[hhᵀ]", "E[zzᵀ]"} & set(usual.table(wide=True))
    with pytest.raises(ValueError, match="pass start="): usual["out"].cagop
    with pytest.raises(ValueError, match="not asked for"): usual["out"].hcov
    started = measure(model, ce, [(words, y)], .1, start=before)
    assert "cAGOP" in started.table() and "E[hhᵀ]" not in started.table()
    wrapped = measure(model, ce, [(words, y)], .1, start={f"module.{k}": v for k, v in before.items()})
    assert torch.equal(wrapped["out"].cagop, started["out"].cagop)


def test_a_weight_that_is_computed_has_no_known_change():
    with seeded(0):
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)).double()
        x, y = torch.randn(6, 4).double(), torch.randint(2, (6,))
    before = {k: v + 1 for k, v in model.state_dict().items()}
    rep = measure(model, ce, [(x, y)], .1, quantities=["agop", "cagop", "hcov"], start=before)
    layer = next(k for k in rep.layers if "original1" in k)
    use = next(iter(rep[layer].uses.values()))
    with pytest.raises(ValueError, match="computed from a parameter"): use.cagop
    assert rel_err(x.T @ x / 6, use.hcov) < 1e-12


def test_watch_follows_them(example):
    model, words, y, before = example
    watch = Watch(ce, [(words, y)], .1, quantities=["agop", "cagop", "hcov"], start=before, similarity="cosine")
    rep = watch(model, 0)
    seen = watch.history.query("layer == 'out'").set_index("quantity").value
    assert abs(seen["cAGOP"] - cosine(rep["out"].cnfm, rep["out"].cagop)) < 1e-10
    assert abs(seen["E[hhᵀ]"] - cosine(rep["out"].nfm, rep["out"].hcov)) < 1e-10
