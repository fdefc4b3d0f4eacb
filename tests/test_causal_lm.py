"""`CausalLMModule` against plain torch on the same transformers model: loss, gradients, rates, sources, refusals."""

from __future__ import annotations

import math
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lightning_moe_ep import CausalLMModule, MoEEPStrategy, TextDataModule, build_pretrained
from tests.contract import contract
from tests.families.tiny import tiny_model
from tests.models import FAMILIES
from tests.parity import Probe, trainer, whole, worst
from tests.pool import RankPool

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    **FAMILIES["qwen3_moe"],
}

Sizes = tuple[tuple[tuple[int, int], ...], ...]
"""By rank and micro-batch: how many sequences of 8 tokens, and how many tokens of each have no label."""


def make_batch(sequences: int, unlabelled: int, *, seed: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 96, (sequences, 8), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :unlabelled] = -100
    return {"input_ids": ids, "labels": labels}


def batches(sizes: Sizes) -> list[list[dict[str, Tensor]]]:
    return [
        [make_batch(*size, seed=10 * rank + micro) for micro, size in enumerate(of_rank)]
        for rank, of_rank in enumerate(sizes)
    ]


class Batches(L.LightningDataModule):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def train_dataloader(self) -> Any:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return DataLoader(batches(self.sizes)[rank], batch_size=None)


def pack(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """All sequences of a batch in one row, told apart by positions that begin anew."""
    rows, length = batch["input_ids"].shape
    labels = batch["labels"].clone()
    labels[:, 0] = -100  # not to be predicted from the sequence before
    positions = torch.arange(length).repeat(rows)[None]
    return {
        "input_ids": batch["input_ids"].reshape(1, -1),
        "labels": labels.reshape(1, -1),
        "position_ids": positions,
    }


class Packed(Batches):
    def train_dataloader(self) -> Any:
        return DataLoader([pack(batch) for batch in batches(self.sizes)[dist.get_rank()]], batch_size=None)


class Logged(L.Callback):
    """What was logged after each batch that stepped."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.values):
            self.values.append({key: float(value) for key, value in trainer.callback_metrics.items()})


def one_step(sizes: Sizes, ep: int, options: dict[str, Any], data: type[Batches] = Batches) -> tuple[dict, dict, dict]:
    """On a rank: initial weights and gradients, whole, and what was logged."""
    L.seed_everything(7, verbose=False)
    probe, logged = Probe(), Logged()
    module = CausalLMModule(**{"config": CONFIG, **options})
    fitted = trainer(
        MoEEPStrategy(ep=ep),
        max_epochs=1,
        accumulate_grad_batches=len(sizes[0]),
        callbacks=[probe, logged],
    )
    fitted.fit(module, data(sizes))
    return probe.initial, probe.gradients[0], logged.values[0]


def right_answer(sizes: Sizes, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """Plain torch: the gradient and the value of the mean over all tokens that have a label."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    model.set_experts_implementation("eager")
    model.load_state_dict(weights)
    sums, count = [], 0
    for batch in (batch for of_rank in batches(sizes) for batch in of_rank if len(batch["input_ids"])):
        log_probabilities = model(input_ids=batch["input_ids"]).logits.log_softmax(dim=-1)
        for row, labels in zip(log_probabilities, batch["labels"].tolist(), strict=True):
            for position, label in enumerate(labels[1:]):
                if label != -100:
                    sums.append(-row[position, label])
                    count += 1
    loss = torch.stack(sums).sum() / count
    loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return gradients, float(loss.detach())


@pytest.mark.parametrize(
    ("sizes", "ep"),
    [
        ((((2, 0), (1, 3)), ((3, 5), (1, 7))), 2),
        ((((2, 2),), ((1, 6),), ((4, 0),), ((1, 8),)), 2),
        ((((0, 0), (2, 4)), ((3, 0), (0, 0))), 2),
        ((((0, 0),), ((2, 4),)), 1),
        ((((3, 1), (1, 5), (2, 0)),), 1),
    ],
    ids=["two micro-batches", "four ranks, one without labels", "empty batches", "empty at ep 1", "one rank"],
)
def test_the_loss_is_the_mean_over_all_tokens(ranks: RankPool, sizes: Sizes, ep: int) -> None:
    results = ranks.run(one_step, sizes, ep, {}, world=len(sizes))
    gradients, loss = right_answer(sizes, results[0][0])
    for _, ours, logged in results:
        error, name = worst(ours, gradients)
        assert error < 1e-5, f"the gradient of {name} is off by {error:.1e}"
        assert logged["train_loss"] == pytest.approx(loss, rel=1e-5)


@contract("Data", "Packed sequences with `position_ids` of their own", "works; leave `attention_mask` out")
def test_packed_sequences_do_not_see_each_other(ranks: RankPool) -> None:
    sizes = (((2, 0), (1, 3)), ((3, 5), (4, 0)))
    results = ranks.run(one_step, sizes, 2, {}, Packed, world=2)
    gradients, loss = right_answer(sizes, results[0][0])
    for _, ours, logged in results:
        error, name = worst(ours, gradients)
        assert error < 1e-5, f"the gradient of {name} is off by {error:.1e}"
        assert logged["train_loss"] == pytest.approx(loss, rel=1e-5)


def test_packed_sequences_with_a_mask_are_refused() -> None:
    module = CausalLMModule(CONFIG)
    batch = pack(make_batch(2, 0, seed=0))
    assert module.count_tokens(batch) == 14
    mask = torch.ones_like(batch["input_ids"])
    with pytest.raises(ValueError, match="position_ids begin anew inside a row"):
        module.count_tokens({**batch, "attention_mask": mask})
    # Positions that stand still on padding are no packing.
    mask[:, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    assert module.count_tokens({**batch, "attention_mask": mask, "position_ids": positions}) == 14


def _validation(sizes: Sizes) -> tuple[dict[str, Tensor], float]:
    """On a rank: the weights and the validation loss, each rank with one batch."""
    L.seed_everything(7, verbose=False)
    module = CausalLMModule(CONFIG)
    loader = DataLoader(batches(sizes)[dist.get_rank()], batch_size=None)
    (result,) = trainer(MoEEPStrategy(ep=2)).validate(module, loader, verbose=False)
    return whole(dict(module.model.named_parameters())), result["val_loss"]


def test_the_validation_loss_is_the_mean_over_all_tokens(ranks: RankPool) -> None:
    sizes = (((2, 0), (1, 3)), ((3, 5), (0, 0)))
    (weights, ours), (_, theirs) = ranks.run(_validation, sizes, world=2)
    assert ours == theirs == pytest.approx(right_answer(sizes, weights)[1], rel=1e-5)


class Rows(Dataset[dict[str, Tensor]]):
    """Twelve sequences; the first token of each is its number."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= len(self):
            raise IndexError
        row = {name: tensor[0] for name, tensor in make_batch(1, 1 + index % 5, seed=index).items()}
        row["input_ids"][0] = index
        return row


class Streamed(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        return iter(Rows()[index] for index in range(dist.get_rank(), 12, 2))


class Resumed(CausalLMModule):
    """Saves after batch `save_at` of the first epoch."""

    def __init__(self, streams: bool, path: str, save_at: int | None = None) -> None:
        super().__init__(CONFIG)
        self.streams, self.path, self.save_at = streams, path, save_at
        self.batches: list[tuple[int, int, int, int]] = []

    def train_dataloader(self) -> Any:
        return DataLoader(Streamed() if self.streams else Rows(), batch_size=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number = int(batch["input_ids"][0, 0])
        self.batches.append((batch_idx, number, self.count_tokens(batch), batch["num_items_in_batch"]))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.save_at:
            self.trainer.save_checkpoint(self.path)


def _resumed(streams: bool, path: str, save_at: int) -> list[list[tuple[int, int, int, int]]]:
    """The batches of a run that saves, and of one that goes on from there."""
    modules = [Resumed(streams, path, save_at), Resumed(streams, path)]
    for module in modules:
        L.seed_everything(7, verbose=False)
        fitted = trainer(max_epochs=1, accumulate_grad_batches=2, use_distributed_sampler=True)
        fitted.fit(module, ckpt_path=None if module.save_at else path)
    return [module.batches for module in modules]


def test_an_epoch_goes_on_where_it_was_saved(ranks: RankPool, tmp_path: Path) -> None:
    # The cosine decay asks for the number of steps, and so for the loader, before a checkpoint is read.
    for before, after in ranks.run(_resumed, False, str(tmp_path / "rows.ckpt"), 1, world=2):
        assert [batch[0] for batch in before] == list(range(6))
        assert after == before[2:]


def test_windows_of_a_stream_that_was_saved_inside_of_one(ranks: RankPool, tmp_path: Path) -> None:
    of_ranks = ranks.run(_resumed, True, str(tmp_path / "stream.ckpt"), 2, world=2)
    first, second = (after for _, after in of_ranks)
    # A stream keeps no position: it begins anew, while the batches are counted on.
    assert [batch[:2] for batch in first] == [(index + 3, 2 * index) for index in range(6)]
    for index, *_, items in first:
        assert items == sum(tokens for at, _, tokens, _ in first + second if at // 2 == index // 2)


def _plain(max_steps: int, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


class Rates(L.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.values.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_the_learning_rate_warms_up_and_decays() -> None:
    rates = Rates()
    module = CausalLMModule(CONFIG, learning_rate=0.1, warmup_steps=4, min_lr_ratio=0.2)
    _plain(12, callbacks=[rates]).fit(module, Batches((((1, 0),) * 12,)))
    assert rates.values[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    decay = [0.02 + 0.08 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert rates.values[4:] == pytest.approx(decay)
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.02)  # the step that was not taken


class EndsInside(CausalLMModule):
    """Ends its first epoch inside an accumulation window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 1 else None


def test_the_logged_loss_has_nothing_of_a_window_that_was_left_open() -> None:
    losses = []
    for kind in (CausalLMModule, EndsInside):
        L.seed_everything(7, verbose=False)
        logged = Logged()
        module = kind(CONFIG)
        _plain(1, accumulate_grad_batches=2, callbacks=[logged]).fit(module, Batches((((1, 0), (1, 0)),)))
        losses.append(logged.values[0]["train_loss"])
    assert losses[1] == pytest.approx(losses[0])


def test_only_matrices_decay() -> None:
    module = CausalLMModule(CONFIG, weight_decay=0.3, betas=(0.8, 0.9))
    fitted = _plain(1)
    fitted.fit(module, Batches((((1, 0),),)))
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    by_decay: dict[float, set[str]] = {}
    for group in fitted.optimizers[0].param_groups:
        by_decay.setdefault(group["weight_decay"], set()).update(names[id(p)] for p in group["params"])
    assert by_decay[0.0] == {name for name in names.values() if "norm" in name}
    assert by_decay[0.3] == set(names.values()) - by_decay[0.0]
    assert any("experts" in name for name in by_decay[0.3])
    assert [group["betas"] for group in fitted.optimizers[0].param_groups] == [(0.8, 0.9)] * 3


def test_an_open_end_is_refused() -> None:
    with pytest.raises(ValueError, match="the cosine decay needs an end: give the Trainer max_steps or max_epochs"):
        _plain(-1, max_epochs=-1).fit(CausalLMModule(CONFIG), Batches((((1, 0),),)))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).save_pretrained(folder)
    return folder


def test_a_pretrained_folder(ranks: RankPool, pretrained: Path) -> None:
    weights = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32).state_dict()
    for initial, *_ in ranks.run(one_step, (((1, 0),), ((1, 0),)), 2, _only_pretrained(pretrained), world=2):
        assert initial.keys() == weights.keys()
        assert all(torch.equal(initial[name], weights[name]) for name in weights)


def _only_pretrained(folder: Path) -> dict[str, Any]:
    return {"config": None, "pretrained": str(folder)}


def test_a_pretrained_folder_under_plain_lightning(pretrained: Path) -> None:
    weights = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32).state_dict()
    module = CausalLMModule(pretrained=str(pretrained), learning_rate=0.0)
    _plain(1).fit(module, Batches((((1, 0),),)))
    assert all(torch.equal(value, weights[name]) for name, value in module.model.state_dict().items())


def _save_weights(path: str, folder: bool) -> dict[str, Tensor]:
    module = CausalLMModule(CONFIG)
    fitted = trainer(MoEEPStrategy(ep=2, save_distributed_checkpoint=folder), max_steps=1)
    fitted.fit(module, Batches((((1, 0),), ((1, 0),))))
    fitted.save_checkpoint(path, weights_only=True)
    return {name: value.detach() for name, value in whole(dict(module.model.named_parameters())).items()}


@pytest.mark.parametrize("folder", [True, False])
def test_weights_of_a_checkpoint_are_tuned_on(ranks: RankPool, tmp_path: Path, folder: bool) -> None:
    path = tmp_path / "c.ckpt"
    weights, _ = ranks.run(_save_weights, str(path), folder, world=2)
    for world in (1, 2, 4):
        data = (((1, 0),),) * world
        for initial, *_ in ranks.run(one_step, data, min(2, world), _only_pretrained(path), world=world):
            assert initial.keys() == weights.keys() | {"lm_head.weight"} or initial.keys() == weights.keys()
            assert all(torch.equal(initial[name], weights[name]) for name in weights)
    module = CausalLMModule(pretrained=str(path), learning_rate=0.0)
    _plain(1).fit(module, Batches((((1, 0),),)))
    assert all(torch.equal(p, weights[name]) for name, p in module.model.named_parameters())


def _tune(folder: str, path: str) -> None:
    fitted = trainer(MoEEPStrategy(ep=2), max_steps=1)
    fitted.fit(CausalLMModule(pretrained=folder), Batches((((1, 0),), ((1, 0),))))
    fitted.save_checkpoint(path)


def test_a_checkpoint_stands_for_itself(ranks: RankPool, pretrained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(pretrained, tmp_path / "folder")
    ranks.run(_tune, str(folder), str(tmp_path / "c.ckpt"), world=2)
    shutil.rmtree(folder)
    loaded = CausalLMModule.load_from_checkpoint(tmp_path / "c.ckpt")
    assert loaded.hparams.pretrained is None
    assert loaded.hparams.config["_name_or_path"] == str(folder)
    assert loaded.model.config.model_type == CONFIG["model_type"]


class _Own(L.LightningModule):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        self.model = build_pretrained(self.hparams.folder)

    def forward(self) -> None:
        """Only so that it can be given to `predict`."""


def _predict(folder: str, path: str) -> None:
    fitted = trainer(MoEEPStrategy(ep=2))
    fitted.predict(_Own(folder), [])
    fitted.save_checkpoint(path)


def test_a_module_of_ones_own_is_loaded_without_a_strategy(ranks: RankPool, pretrained: Path, tmp_path: Path) -> None:
    ranks.run(_predict, str(pretrained), str(tmp_path / "c.ckpt"), world=2)
    loaded = _Own.load_from_checkpoint(tmp_path / "c.ckpt").model
    right = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
    assert all(torch.equal(p, right.get_parameter(name)) for name, p in loaded.named_parameters())
    assert all(torch.equal(b, right.get_buffer(name)) for name, b in loaded.named_buffers())


def test_load_from_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "c.ckpt"
    for weights in ranks.run(_saved, str(path), world=2):
        loaded = CausalLMModule.load_from_checkpoint(path, weights_only=False)
        assert loaded.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())


def _saved(path: str) -> dict[str, Tensor]:
    module = CausalLMModule(CONFIG)
    fitted = trainer(MoEEPStrategy(ep=2, save_distributed_checkpoint=False), max_steps=1)
    fitted.fit(module, Batches((((1, 0),), ((1, 0),))))
    fitted.save_checkpoint(path)
    return whole(dict(module.named_parameters()))


def test_plain_lightning_learns_by_heart() -> None:
    L.seed_everything(7, verbose=False)
    logged = Logged()
    module = CausalLMModule(CONFIG, learning_rate=3e-3, warmup_steps=1)
    batch = make_batch(2, 0, seed=0)
    _plain(30, callbacks=[logged]).fit(module, DataLoader([batch] * 30, batch_size=None))
    assert logged.values[0]["train_loss"] > 4
    assert logged.values[-1]["train_loss"] < 1


@pytest.fixture
def text(tmp_path: Path) -> dict[str, str]:
    """The arguments of a TextDataModule with a tokenizer of 32 ids."""
    letters = [chr(97 + i) for i in range(26)]
    vocab = {token: i for i, token in enumerate(["<end>", "<?>", *letters, "ab", "bc", "ca", "de"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("b", "c"), ("c", "a"), ("d", "e")], unk_token="<?>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", unk_token="<?>")
    fast.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text").mkdir()
    for i in range(10):
        (tmp_path / "text" / f"{i}.txt").write_text("abcabc dede " * 40)
    return {
        "paths": [str(tmp_path / "text")],
        "tokenizer": str(tmp_path / "tokenizer"),
        "cache_dir": str(tmp_path / "cache"),
    }


def test_text_and_a_tokenizer_end_to_end(text: dict[str, Any]) -> None:
    L.seed_everything(7, verbose=False)
    data = TextDataModule(**text, block_size=16, batch_size=4)
    fitted = _plain(20, limit_val_batches=2, val_check_interval=20, check_val_every_n_epoch=None)
    fitted.fit(CausalLMModule({**CONFIG, "vocab_size": 32}, learning_rate=3e-3, warmup_steps=1), data)
    assert fitted.callback_metrics["val_loss"] < 1.5  # guessing is log 32 = 3.5
    predicted = fitted.predict(fitted.lightning_module, data)
    assert predicted[0].shape == (4, 16)


def test_a_vocabulary_that_is_too_small(text: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match="the data has 32 token ids, but the model's vocab_size is 31; use the model's"
    ):
        _plain(1).fit(CausalLMModule({**CONFIG, "vocab_size": 31}), TextDataModule(**text, block_size=16))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ValueError, "give exactly one of config .* and pretrained"),
        ({"config": CONFIG, "pretrained": "."}, ValueError, "give exactly one of config .* and pretrained"),
        ({"config": {"vocab_size": 8}}, ValueError, "config needs a model_type, such as qwen3_moe"),
        ({"pretrained": "nowhere"}, FileNotFoundError, "pretrained='nowhere' is neither a folder nor a che"),
    ],
)
def test_wrong_arguments_are_refused_at_once(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        CausalLMModule(**options)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError), match=str(tmp_path)):
        _plain(1).fit(CausalLMModule(pretrained=str(tmp_path)), Batches((((1, 0),),)))


def test_bytes_are_refused_for_a_pretrained_model_with_a_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "pretrained"
    folder.mkdir()
    module = CausalLMModule(pretrained=str(folder))
    (folder / "tokenizer_config.json").write_text("{}")
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(tokenizer=None, vocab_size=256))
    with pytest.raises(ValueError, match=rf"tokenized as bytes, but {folder} has a tokenizer .* add --data.tokenizer"):
        module._check_vocabulary()


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt_oss", "GptOssModel makes its masks without positions"),
        ("qwen3_next", "linear_attention take a row for one"),
    ],
)
def test_packed_sequences_that_transformers_does_not_keep_apart_are_told_of_once(family: str, words: str) -> None:
    module = CausalLMModule(config={"model_type": "qwen3_moe"})
    module.model = tiny_model(family)
    batch = make_batch(2, 0, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.count_tokens(batch | {"position_ids": torch.arange(8).expand(2, 8)})
        padded = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])  # padding has position 1, as in transformers' generation
        positions = (padded.cumsum(dim=1) - 1).masked_fill(padded == 0, 1)
        module.count_tokens(make_batch(1, 0, seed=0) | {"position_ids": positions, "attention_mask": padded})
    with pytest.warns(UserWarning, match=f"influence each other in transformers' {family}: .*{words}"):
        module.count_tokens(pack(batch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.count_tokens(pack(batch))
        module._told_of_packing, module.model = False, tiny_model("qwen3_moe")
        module.count_tokens(pack(batch))
