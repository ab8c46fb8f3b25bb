"""Callbacks of the trainers, and what follows their optimizers: against plain torch, over precision, accumulation, clipping."""
import importlib
import logging
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fact_nb.linalg import rel_err
from fact_nb.networks.models import mlp
from fact_nb.networks.moving_average import Motion
from fact_nb.networks.zero_decay import MeanStep
from fact_nb.runtime import seeded

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
VOCABULARY, LENGTH = 11, 8


class Text(torch.utils.data.Dataset):
    "Rows of different numbers of labels that count."
    def __len__(self): return 48

    def __getitem__(self, i):
        row = (torch.arange(LENGTH) * (1 + i % 3) + i) % VOCABULARY
        return dict(input_ids=row, labels=torch.where(torch.arange(LENGTH) < i % 5, -100, row))


def hf_trainer(folder, report_to=(), **options):
    transformers = pytest.importorskip("transformers", reason="pip install 'fact_nb[integrations]'")
    pytest.importorskip("accelerate", reason="pip install 'fact_nb[integrations]'")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=24,
                                      vocab_size=VOCABULARY, max_position_embeddings=LENGTH)
    args = dict(max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=3, max_grad_norm=.3, learning_rate=1e-2,
                weight_decay=.1, logging_steps=2, use_cpu=True, disable_tqdm=True, save_strategy="no", report_to=list(report_to))
    arguments = transformers.TrainingArguments(output_dir=str(folder), **(args | options))
    return transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=Text())


def by_hand(model, rows, layer, decay, smoothing=0.):
    "−(1/λ)Wᵀ∇L of the mean over all labels that count, by torch alone; and W."
    batch = {k: torch.stack([r[k] for r in rows]) for k in rows[0]}
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), label_smoothing=smoothing)
    W = model.get_submodule(layer).weight
    G, = torch.autograd.grad(loss, W)
    return -(W.T @ G).detach() / decay, W.detach()


def pearson_of(A, B):
    return float(torch.corrcoef(torch.stack([A.flatten(), B.flatten()]))[0, 1])


LAYER = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("options", [dict(label_smoothing_factor=.1), dict(optim="sgd", gradient_accumulation_steps=1)], ids=str)
def test_huggingface_logs_what_torch_computes(tmp_path, options):
    "The probe is the first rows of the training set, in batches of unequal weight; the loss is the Trainer's."
    trainer = hf_trainer(tmp_path, **options)
    from fact_nb.integrations.huggingface import FactCallback
    callback = FactCallback(trainer, every=3, samples=18)
    trainer.add_callback(callback)
    trainer.train()
    assert list(callback.history.step) == [0, 3, 6] and [len(b["labels"]) for b in callback.probe] == [4, 4, 4, 4, 2]
    fact, W = by_hand(trainer.model, [Text()[i] for i in range(18)], LAYER, .1, options.get("label_smoothing_factor", 0.))
    seen = callback.history.iloc[-1]
    assert abs(seen[f"fact/{LAYER}/FACT"] - pearson_of(fact, W.T @ W)) < 1e-4
    assert abs(seen[f"fact/{LAYER}/FACT_error"] - rel_err(W.T @ W, fact)) < 1e-3 * rel_err(W.T @ W, fact)
    logged = [row for row in trainer.state.log_history if "fact/probe_loss" in row]
    assert [row["step"] for row in logged] == [0, 3, 6] and "loss" not in logged[0]
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [2, 4, 6]


def test_huggingface_training_is_not_disturbed(tmp_path):
    "The same bits with and without, under accumulation, clipping, autocast and checkpointing."
    ends = []
    for watched in (False, True):
        trainer = hf_trainer(tmp_path / str(watched), bf16=True, gradient_checkpointing=True)
        if watched:
            from fact_nb.integrations.huggingface import FactCallback
            trainer.add_callback(FactCallback(trainer, every=2))
        trainer.train()
        ends.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends))


@pytest.mark.parametrize("printed", [False, True])
def test_huggingface_prints_only_if_asked(tmp_path, capsys, printed):
    trainer = hf_trainer(tmp_path, max_steps=1)
    from fact_nb.integrations.huggingface import FactCallback
    trainer.add_callback(FactCallback(trainer, printed=printed))
    trainer.train()
    out = capsys.readouterr().out
    assert ("fact/median" in out) is printed and "train_loss" in out


def test_huggingface_followers(tmp_path):
    "Through accelerate's wrapper and step(None): Motion's exact sum on SGD; MeanStep lists what does not decay."
    from fact_nb.networks.moving_average import bare_optimizer
    trainer = hf_trainer(tmp_path, optim="sgd")
    from fact_nb.integrations.huggingface import FactCallback
    motion = Motion(trainer.model, exact=True)
    trainer.add_callback(FactCallback(trainer, every=2, follow=motion))
    trainer.train()
    assert motion.count == 6 and (motion.table().r_exact < 1e-3).all()
    assert type(trainer.optimizer) is not type(bare_optimizer(trainer.optimizer))

    trainer = hf_trainer(tmp_path)
    trainer.create_optimizer()
    norms, held = trainer.optimizer.param_groups[1], trainer.optimizer.param_groups[0]
    embedding = trainer.model.get_input_embeddings().weight
    held["params"] = [p for p in held["params"] if p is not embedding]
    norms["params"] = [*norms["params"], embedding]
    mean = MeanStep(trainer.model, trainer.optimizer)
    assert list(mean.skipped) == ["model.embed_tokens"]
    trainer.train()
    with pytest.warns(UserWarning, match="too short: κ"): table = mean.table()
    assert table.layer.tolist()[-1] == "model.embed_tokens" and table.pearson.notna().sum() == len(table) - 1


def regression(optimizer="sgd"):
    pl = pytest.importorskip("lightning.pytorch", reason="pip install 'fact_nb[integrations]'")

    class Regression(pl.LightningModule):
        def __init__(self):
            super().__init__()
            with seeded(0): self.net = mlp(6, 2, 8, 1)
            self.gradients = 0.

        def training_step(self, batch, batch_idx):
            return dict(loss=F.mse_loss(self.net(batch[0]), batch[1]))

        def on_before_optimizer_step(self, opt):
            self.gradients = self.gradients + self.net[0].weight.grad.clone()

        def configure_optimizers(self):
            if optimizer == "sgd": return torch.optim.SGD(self.parameters(), lr=.05, momentum=.5, weight_decay=1e-2)
            return torch.optim.AdamW(self.parameters(), lr=.01, weight_decay=1e-2)
    return Regression()


def fit(module, *callbacks, **options):
    from lightning.pytorch import Trainer
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(rows, rows[:, :2] * rows[:, 2:4])
    args = dict(max_epochs=2, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, logger=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(callbacks=list(callbacks), **(args | options))
        torch.manual_seed(2)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    return rows


@pytest.mark.parametrize("options", [dict(), dict(accumulate_grad_batches=5), dict(precision="bf16-mixed")], ids=str)
def test_lightning_logs_what_torch_computes(options):
    module = regression()
    from fact_nb.integrations.lightning import FactCallback
    callback = FactCallback(every=2, samples=30)
    rows = fit(module, callback, **options)[:30]
    steps = 4 if "accumulate_grad_batches" in options else 20
    assert list(callback.history.step) == list(range(0, steps + 1, 2))
    W = module.net[0].weight
    G, = torch.autograd.grad(F.mse_loss(module.net(rows), rows[:, :2] * rows[:, 2:4]), W)
    fact = -(W.T @ G).detach() / 1e-2
    loose = .03 if "precision" in options else 1e-4
    assert abs(callback.history.iloc[-1]["fact/net.0/FACT"] - pearson_of(fact, (W.T @ W).detach())) < loose


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_lightning_gradients_are_not_stale(optimizer):
    "Lightning passes a closure: what is averaged is the gradient of the step, not that of the last one."
    module = regression(optimizer)
    from fact_nb.integrations.lightning import FactCallback
    follower = Motion(module, exact=True) if optimizer == "sgd" else MeanStep(module, gradient=True)
    fit(module, FactCallback(follow=follower), accumulate_grad_batches=2)
    assert follower.count == 10
    if optimizer == "sgd": assert (follower.table().r_exact < 1e-4).all()
    else: assert rel_err(module.gradients * .01, follower.grads["net.0"]) < 1e-5


def test_fused_steps_under_a_scaler():
    "A fused optimizer divides by the scale inside its step, and skips a step with infinite gradients by itself."
    with seeded(0): nets, X, Y = [mlp(6, 2, 8, 1) for _ in range(2)], torch.randn(20, 6), torch.randn(20, 2)
    nets[1].load_state_dict(nets[0].state_dict())
    followers = []
    for net, scaled in zip(nets, (True, False)):
        opt = torch.optim.SGD(net.parameters(), lr=.05, weight_decay=1e-2, fused=True)
        followers.append(Motion(net, opt, exact=True))
        scale = torch.tensor(2.**16) if scaled else None
        for i in range(6):
            opt.zero_grad()
            (F.mse_loss(net(X), Y) * (1. if scale is None else scale)).backward()
            if scaled:
                if i == 3: net[0].weight.grad.fill_(float("inf"))
                opt.grad_scale, opt.found_inf = scale, torch.tensor(float(i == 3))
            if scaled or i != 3: opt.step()
    scaled, plain = followers
    assert scaled.count == plain.count == 5
    for a, b in zip(scaled.forward.values(), plain.forward.values()):
        assert rel_err(b.ema, a.ema) < 1e-5 and rel_err(b.exact, a.exact) < 1e-5


def test_a_young_average_is_told_from_an_old_one():
    "By a warning that names the share of the start; without decay there is none."
    with seeded(0): net, X, Y = mlp(4, 2, 6, 1), torch.randn(20, 4), torch.randn(20, 2)
    for decay, steps, young in ((.1, 5, True), (.1, 60, False), (0., 5, False)):
        opt = torch.optim.SGD(net.parameters(), lr=.1, weight_decay=decay)
        motion = Motion(net, opt)
        for _ in range(steps):
            opt.zero_grad()
            F.mse_loss(net(X), Y).backward()
            opt.step()
        motion.stop()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            motion.table()
        assert [("still holds up to 90%" in str(w.message)) for w in said] == [True] * young


def test_names_of_a_wrapped_model_are_its_own():
    net = mlp(4, 2, 6, 1)
    assert list(Motion(nn.DataParallel(net)).forward) == list(Motion(net).forward)


@pytest.mark.parametrize("module", ["huggingface", "lightning"])
def test_without_the_extra_one_line_says_what_to_do(monkeypatch, module):
    library = dict(huggingface="transformers", lightning="lightning.pytorch")[module]
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"fact_nb.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'fact_nb\[integrations\]'"):
        importlib.import_module(f"fact_nb.integrations.{module}")
