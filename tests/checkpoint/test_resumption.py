"""A training that stops inside of an epoch sees each sample once, and draws the numbers that it would have drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ep import MoEEPStrategy
from tests.checkpoint.runs import EP2, EP4, FORMS, MIXED, SINGLE, At
from tests.matrix import mostly_more
from tests.models import build
from tests.parity import trainer, worst
from tests.pool import RankPool

SAMPLES = 24
"""In an epoch."""


class Numbered(L.LightningModule):
    """Takes samples by number; keeps which, and what was drawn for them."""

    def __init__(self, batch_size: int, random: bool) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen: list[list[int]] = []
        self.drawn: list[float] = []

    def configure_model(self) -> None:
        self.model = build("own")

    def train_dataloader(self) -> Any:
        numbers = torch.arange(SAMPLES)
        inputs = torch.randn(SAMPLES, 4, 64, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(numbers, inputs), batch_size=self.hparams.batch_size)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        numbers, inputs = batch
        self.seen.append(numbers.tolist())
        inputs = inputs.flatten(0, 1)
        if self.hparams.random:
            self.drawn += [random.random(), np.random.rand()]
            inputs = nn.functional.dropout(inputs)
        return self.model(inputs).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3)


@dataclass(frozen=True)
class Fit:
    at: At
    batch_size: int
    accumulate: int = 1
    form: str = "folder"
    random: bool = False
    epochs: int = 2
    max_steps: int = -1
    resume: str | None = None
    save: str | None = None
    save_at: int = 2


class SaveAt(L.Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(self.path)


def fit(of: Fit) -> tuple[list[list[int]], list[float], dict[str, Tensor], int]:
    """On a rank: the samples of each micro-batch, numbers drawn, weights, and the epochs that were completed."""
    L.seed_everything(3, verbose=False)
    module = Numbered(of.batch_size, of.random)
    strategy = MoEEPStrategy(ep=of.at.ep, replicate=of.at.replicate, save_distributed_checkpoint=FORMS[of.form])
    fitted = trainer(
        strategy,
        max_epochs=of.epochs,
        max_steps=of.max_steps,
        accumulate_grad_batches=of.accumulate,
        callbacks=[SaveAt(of.save_at, of.save)] if of.save else [],
        use_distributed_sampler=True,
    )
    fitted.fit(module, ckpt_path=of.resume)
    weights = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in module.model.named_parameters()}
    return module.seen, module.drawn, {n: w.detach().clone() for n, w in weights.items()}, fitted.current_epoch


def of_steps(ranks: list[list[list[int]]], accumulate: int) -> list[set[int]]:
    """The samples of each optimizer step."""
    batches = [[sample for rank in ranks for sample in rank[number]] for number in range(len(ranks[0]))]
    return [
        {sample for batch in batches[first : first + accumulate] for sample in batch}
        for first in range(0, len(batches), accumulate)
    ]


WAYS = {
    # a step is 4 samples
    "as it was": (Fit(EP2, 2), Fit(EP2, 2)),
    "fewer ranks": (Fit(EP4, 1), Fit(EP2, 1, accumulate=2)),
    "one rank": (Fit(EP2, 2), Fit(SINGLE, 1, accumulate=4)),
    "more ranks": (Fit(SINGLE, 2, accumulate=2), Fit(MIXED, 1)),
    "larger batches": (Fit(EP2, 1, accumulate=2), Fit(EP2, 2)),
}


SAMPLED = [(way, save_at, form) for way in WAYS for save_at in (2, 6, 8) for form in FORMS]
KEPT = [
    ("as it was", 2, "folder"),
    ("fewer ranks", 6, "folder"),
    ("one rank", 8, "file"),
    ("more ranks", 2, "folder"),
    ("larger batches", 8, "folder"),
]


@pytest.mark.parametrize(("way", "save_at", "form"), mostly_more(SAMPLED, *KEPT))
def test_samples(ranks: RankPool, tmp_path: Path, way: str, save_at: int, form: str) -> None:
    before, after = WAYS[way]
    path = str(tmp_path / "c.ckpt")
    before = Fit(**{**vars(before), "form": form, "save": path, "save_at": save_at})
    straight = ranks.run(fit, before, world=before.at.world)
    steps = of_steps([seen for seen, *_ in straight], before.accumulate)
    assert len(steps) == 12 and set().union(*steps[:6]) == set(range(SAMPLES))
    after = Fit(**{**vars(after), "form": form, "resume": path})
    resumed = ranks.run(fit, after, world=after.at.world)
    assert of_steps([seen for seen, *_ in resumed], after.accumulate) == steps[save_at:]
    for *_, weights, epochs in resumed:
        error, name = worst(weights, straight[0][2])
        assert error < 1e-5, f"{name} is off by {error:.1e}"
        assert epochs == 2


@pytest.mark.parametrize("save_at", mostly_more([2, 6, 8], 2, 6))
def test_random_numbers(ranks: RankPool, tmp_path: Path, save_at: int) -> None:
    path = str(tmp_path / "c.ckpt")
    straight = ranks.run(fit, Fit(EP2, 2, random=True, save=path, save_at=save_at), world=2)
    resumed = ranks.run(fit, Fit(EP2, 2, random=True, resume=path), world=2)
    for (seen, drawn, weights, _), (seen_before, drawn_before, weights_before, _) in zip(
        resumed, straight, strict=True
    ):
        assert seen == seen_before[save_at:]
        assert drawn == drawn_before[2 * save_at :]
        assert all(torch.equal(weights[name], weights_before[name]) for name in weights)
    assert straight[0][1] == straight[1][1], "seed_everything seeds all ranks alike"


class Watched(Numbered):
    """Keeps the numbers of its batches, of those that stepped, of the last ones, and when it was validated."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size, False)
        self.batches: list[int] = []
        self.stepped: list[int] = []
        self.last: list[int] = []
        self.validated: list[int] = []

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.batches.append(batch_idx)
        if self.trainer.is_last_batch:
            self.last.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        self.stepped.append(batch_idx)
        super().optimizer_step(epoch, batch_idx, *args, **kwargs)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.batches[-1])


def _watch(runs: list[tuple[int, int, str | None]], callback: L.Callback | None = None) -> list[tuple[list[Any], ...]]:
    """Of each batch size, accumulation and checkpoint, what the module kept in an epoch."""
    modules = []
    for batch_size, accumulate, resume in runs:
        L.seed_everything(3, verbose=False)
        modules.append(Watched(batch_size))
        fitted = trainer(
            MoEEPStrategy(ep=1),
            max_epochs=1,
            limit_val_batches=1,
            num_sanity_val_steps=0,
            accumulate_grad_batches=accumulate,
            callbacks=[callback] if callback else [],
            use_distributed_sampler=True,
        )
        fitted.fit(modules[-1], ckpt_path=resume)
        assert fitted.current_epoch == 1
    return [(m.seen, m.batches, m.stepped, m.last, m.validated) for m in modules]


@pytest.mark.parametrize("world", [1, 2])
def test_the_end_of_an_epoch_with_other_batches(ranks: RankPool, tmp_path: Path, world: int) -> None:
    path = str(tmp_path / "c.ckpt")
    ranks.run(_watch, [(2, 1, None)], SaveAt(2, path), world=2)
    behind = 8
    runs = [(size, accumulate, path) for size in (1, 5, 7, 16) for accumulate in (1, 2, 3)]
    of_ranks = ranks.run(_watch, runs, world=world)
    for number, (size, accumulate, _) in enumerate(runs):
        total, left = (-(-samples // (size * world)) for samples in (SAMPLES, SAMPLES - behind))
        numbers = list(range(total - left, total))
        steps = [n for n in numbers if (n + 1) % accumulate == 0 or n == total - 1]
        seen = []
        for of_rank in of_ranks:
            samples, batches, stepped, last, validated = of_rank[number]
            assert (batches, stepped, last, validated) == (numbers, steps, [total - 1], [total - 1]), (size, accumulate)
            seen += [sample for batch in samples for sample in batch]
        assert len(seen) == len(set(seen)) == SAMPLES - behind


class Fails(Watched):
    """Raises in a batch."""

    def __init__(self, fails_at: int) -> None:
        super().__init__(2)
        self.fails_at = fails_at

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.fails_at:
            raise ArithmeticError
        return super().training_step(batch, batch_idx)


def _fail(folder: str, fails_at: int) -> list[list[int]]:
    L.seed_everything(3, verbose=False)
    module = Fails(fails_at)
    keeps = ModelCheckpoint(folder, filename=str(fails_at), save_on_exception=True)
    fitted = trainer(
        MoEEPStrategy(ep=2),
        max_epochs=1,
        num_sanity_val_steps=0,
        callbacks=[keeps],
        enable_checkpointing=True,
        use_distributed_sampler=True,
    )
    with pytest.raises(ArithmeticError):
        fitted.fit(module)
    return module.seen


@pytest.mark.parametrize("fails_at", [3, 5])
def test_the_batch_that_failed_is_trained_again(ranks: RankPool, tmp_path: Path, fails_at: int) -> None:
    before = ranks.run(_fail, str(tmp_path), fails_at, world=2)
    after = ranks.run(_watch, [(2, 1, str(tmp_path / f"{fails_at}.ckpt"))], world=2)
    for ((_, batches, stepped, last, validated),) in after:
        assert batches == stepped == list(range(fails_at, 6))
        assert last == validated == [5]
    runs = [*before, *(seen for ((seen, *_),) in after)]
    assert sorted(sample for seen in runs for batch in seen for sample in batch) == list(range(SAMPLES))


def _in_plain_lightning(path: str) -> int:
    module = Numbered(4, False)
    plain = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        max_epochs=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    plain.fit(module, ckpt_path=path)
    return plain.global_step


def test_plain_lightning_goes_on_from_inside_an_epoch(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "c.ckpt")
    ranks.run(fit, Fit(EP2, 2, form="file", save=path), world=2)
    assert _in_plain_lightning(path) == 12
