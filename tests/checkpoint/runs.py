"""Runs that save and resume, on the pool's ranks or in plain Lightning.

Every layout sees the same data: a step is four fixed micro-batches, dealt out to the ranks and accumulated, so that the
mean over them is the same whatever the world.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe_ep import MoEEPStrategy
from tests.models import ADAM_EPS, NOTHING, build, freeze, loss_of, make_batch
from tests.parity import plain, trainer
from tests.pool import RankPool

STEP = 4
"""Micro-batches of a step, over all ranks."""

N = 4
"""Steps before and after the save. The micro-batches before it are then a multiple of every accumulation window."""

FORMS = {"folder": True, "file": False}
"""`save_distributed_checkpoint` by the name of the form."""

MODELS: dict[str, dict[str, Any]] = {
    "even": {},
    "6 experts of odd width": {"num_experts": 6, "intermediate_size": 33},
    "1 expert a rank": {"num_experts": 2},
    "a list of experts": {"kind": "own_list_mixtral", "num_experts": 6},
}
"""What is saved and resumed at every layout."""

WITH_BIAS = "with a choice bias"


@dataclass(frozen=True)
class At:
    """A layout."""

    world: int
    ep: int
    replicate: int = 1

    def __str__(self) -> str:
        return f"{self.world}-{self.ep}-{self.replicate}"


SINGLE, FSDP, EP2, MIXED, EP4, REPLICAS = At(1, 1), At(2, 1), At(2, 2), At(4, 2), At(4, 4), At(4, 2, 2)


@dataclass(frozen=True)
class Run:
    """One fit: where, how far, and what of checkpoints."""

    at: At | None = None
    """None: plain Lightning on one device."""
    form: str = "folder"
    model: str = "even"
    optimizer: str = "adamw"
    max_steps: int = N
    resume: str | None = None
    save: str | None = None
    """Where to save after the last step."""
    save_first: str | None = None
    """Where to save before the first step."""
    weights_only: bool = False
    callbacks: dict[str, Any] | None = None
    """Of a ModelCheckpoint, if there is to be one."""
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    """Further options of the strategy."""
    hparams: dict[str, Any] = field(default_factory=dict)
    seed: int = 7
    """Of the initial weights."""


class Module(L.LightningModule):
    def __init__(self, model: str = "even", optimizer: str = "adamw", **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        options = dict({**MODELS, WITH_BIAS: {"choice_bias": True}}[self.hparams.model])
        self.model = build(options.pop("kind", "own"), lora=self.hparams.get("lora"), **options)
        freeze(self.model, self.hparams.get("frozen", NOTHING))

    def train_dataloader(self) -> Any:
        return DataLoader(list(range(1000)), batch_size=None)

    def val_dataloader(self) -> Any:
        return DataLoader([make_batch("own", 16, seed=1)], batch_size=None)

    def training_step(self, number: int, batch_idx: int) -> Tensor:
        # What a step sees depends on how many there were: Lightning keeps no position in the data.
        share = self.trainer.accumulate_grad_batches
        micro = self.trainer.global_rank * share + batch_idx % share
        loss = loss_of(self.model, make_batch("own", 16, seed=100 * self.trainer.global_step + micro))
        self.log("step_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.model, batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.hparams.optimizer == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        else:
            matrices = [p for p in self.parameters() if p.ndim > 1]
            vectors = [p for p in self.parameters() if p.ndim == 1]
            groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(groups, lr=3e-3, eps=ADAM_EPS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SaveFirst(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


@dataclass
class Outcome:
    """Of a rank."""

    weights: dict[str, Tensor]
    global_step: int
    rate: float
    messages: list[str]
    """What was warned of while saving and loading."""


def run(of: Run) -> Outcome:
    """On a rank of the pool, or in the test's own process for plain Lightning."""
    L.seed_everything(of.seed, verbose=False)
    module = Module(of.model, of.optimizer, **of.hparams)
    with messages() as seen:
        fitted = make_trainer(of)
        fitted.fit(module, ckpt_path=of.resume)
        if of.save:
            fitted.save_checkpoint(of.save, weights_only=of.weights_only)
    rate = fitted.lr_scheduler_configs[0].scheduler.get_last_lr()[0]
    return Outcome(plain(module.model, dict(module.model.state_dict())), fitted.global_step, rate, seen)


def make_trainer(of: Run) -> L.Trainer:
    callbacks: list[L.Callback] = [SaveFirst(of.save_first)] if of.save_first else []
    if of.callbacks is not None:
        callbacks.append(ModelCheckpoint(**of.callbacks))
    options = {
        "max_steps": of.max_steps,
        "limit_val_batches": 0,
        "callbacks": callbacks,
        "enable_checkpointing": of.callbacks is not None,
        **of.options,
    }
    if of.at is None:
        return L.Trainer(
            accelerator="cpu",
            devices=1,
            accumulate_grad_batches=STEP,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
    options.setdefault("accumulate_grad_batches", STEP // of.at.world)
    strategy = MoEEPStrategy(
        ep=of.at.ep, replicate=of.at.replicate, save_distributed_checkpoint=FORMS[of.form], **of.strategy
    )
    return trainer(strategy, **options)


@contextmanager
def messages() -> Iterator[list[str]]:
    """Everything that is warned of, through `warnings` or a logger of torch's."""
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("torch", "torch.distributed", "torch.distributed.tensor")]
    for logger in loggers:
        logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield seen
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
            seen += [str(warning.message) for warning in caught]


def on(ranks: RankPool, of: Run) -> list[Outcome]:
    return [run(of)] if of.at is None else ranks.run(run, of, world=of.at.world)
