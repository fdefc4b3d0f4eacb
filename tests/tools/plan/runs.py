"""Small runs that are planned in one process and measured on the pool's ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_moe_ep import MoEEPStrategy
from lightning_moe_ep.context_parallel import shard_sequences
from lightning_moe_ep.layout import Layout
from tests.models import HIDDEN, NOTHING, build, freeze, loss_of, make_batch
from tests.parity import trainer

DEEPSEEK = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
"""A dense first layer, shared experts, a bias that the router chooses by, sizes that 4 ranks do not divide."""


@dataclass(frozen=True)
class Run:
    """One fit."""

    kind: str = "qwen3_moe"
    model: dict[str, Any] = field(default_factory=dict)
    frozen: str = NOTHING
    world: int = 2
    ep: int = 2
    replicate: int = 1
    cp: int = 1
    length: int = 8
    precision: str = "32-true"
    optimizer: str = "adamw"
    strategy: dict[str, Any] = field(default_factory=dict)
    sequences: int = 2
    accumulate: int = 1

    @property
    def layout(self) -> Layout:
        return Layout.for_world(self.world, ep=self.ep, replicate=self.replicate, cp=self.cp)

    def build(self) -> nn.Module:
        if self.kind == "deepseek_v3":
            config = AutoConfig.for_model("deepseek_v3", **{**DEEPSEEK, **self.model})
            model = AutoModelForCausalLM.from_config(config)
        else:
            model = build(self.kind, **self.model)
        freeze(model, self.frozen)
        return model


class RunModule(L.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.temperature = nn.Parameter(torch.ones(3))
        """Held whole on every rank."""

    def configure_model(self) -> None:
        self.model = self.run.build()

    def train_dataloader(self) -> Any:
        tokens, length = self.run.length * self.run.sequences, self.run.length
        batches = [make_batch(self.run.kind, -(-tokens // 8) * 8, seed=seed) for seed in range(2 * self.run.accumulate)]
        if not self.run.kind.startswith("own"):
            batches = [{"input_ids": batch["input_ids"].flatten()[:tokens].view(-1, length)} for batch in batches]
        return DataLoader(batches, batch_size=None)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return step_of(self, batch, self.run.cp, self.trainer.strategy.meshes.cp_rank)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.run.optimizer == "two":
            flat = [parameter for parameter in trained if parameter.ndim == 2]
            other = [parameter for parameter in trained if parameter.ndim != 2]
            steps = self.trainer.estimated_stepping_batches
            muon = torch.optim.Muon(flat, lr=1e-3, weight_decay=1 / steps)
            return [muon, torch.optim.SGD(other, lr=1e-3, momentum=0.9)]
        if self.run.optimizer == "sgd":
            return {"optimizer": torch.optim.SGD(trained, lr=1e-3)}
        return torch.optim.AdamW(trained, lr=1e-3)


class TwoOptimizers(RunModule):
    """Steps both of its optimizers by itself."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in optimizers:
            optimizer.step()


def step_of(module: RunModule, batch: dict[str, Tensor], cp: int, cp_rank: int) -> Tensor:
    """The loss of a batch, or of a rank's slice of it."""
    if cp == 1:
        return loss_of(module.model, batch) * module.temperature.mean()
    ids = batch["input_ids"]
    return loss_of_slice(module.model, {"input_ids": ids, "labels": ids}, cp, cp_rank) * module.temperature.mean()


def loss_of_slice(model: nn.Module, batch: dict[str, Tensor], cp: int, cp_rank: int) -> Tensor:
    """The part of a rank of the mean loss of a batch of whole sequences, times cp: it is averaged over ranks."""
    sliced = shard_sequences(batch, rank=cp_rank, size=cp)
    targets = sliced.pop("shift_labels").flatten()
    logits = model(**sliced, use_cache=False).logits
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum")
    return total * cp / batch["labels"][:, 1:].numel()


def module_of(run: Run) -> RunModule:
    return (TwoOptimizers if run.optimizer == "two" else RunModule)(run)


def on_meta(run: Run) -> RunModule:
    """The module with its model, on the meta device."""
    with torch.device("meta"):
        module = module_of(run)
        module.configure_model()
    return module


@dataclass
class Measured(L.Callback):
    """What a rank has, in bytes, once it has trained."""

    parameters: int = 0
    allocated: int = 0
    """By the storages of the parameters."""
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        of = [parameter for parameter in pl_module.parameters() if parameter.grad is not None]
        self.gradients = sum(bytes_of(parameter.grad) for parameter in of)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        parameters = list(pl_module.parameters())
        self.parameters = sum(map(bytes_of, parameters))
        storages = {local(p).untyped_storage().data_ptr(): local(p).untyped_storage().nbytes() for p in parameters}
        self.allocated = sum(storages.values())
        self.buffers = sum(map(bytes_of, pl_module.buffers()))
        self.optimizer = sum(
            bytes_of(value)
            for each in trainer.optimizers
            for state in each.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def bytes_of(tensor: Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()


def measure(runs: list[Run]) -> list[dict[str, int]]:
    """On a rank: what each run's `Measured` saw."""
    measured = []
    for run in runs:
        L.seed_everything(7, verbose=False)
        seen = Measured()
        fit(run, seen)
        numbers = vars(seen).items()
        measured.append({name: value for name, value in numbers if type(value) is int})
    return measured


def fit(run: Run, callback: L.Callback) -> None:
    assert dist.get_world_size() == run.world
    strategy = MoEEPStrategy(ep=run.ep, replicate=run.replicate, cp=run.cp, **run.strategy)
    trainer(
        strategy,
        max_epochs=1,
        precision=run.precision,
        accumulate_grad_batches=run.accumulate,
        callbacks=[callback],
    ).fit(module_of(run))


@dataclass(frozen=True)
class StepOf:
    """The training step of a `RunModule`, on a batch of zeros."""

    run: Run

    def __call__(self, module: RunModule, cp: int) -> Tensor:
        tokens = self.run.length * self.run.sequences
        if self.run.kind.startswith("own"):
            batch = {name: torch.zeros(tokens, HIDDEN) for name in ("x", "y")}
        else:
            batch = {"input_ids": torch.zeros(tokens // self.run.length, self.run.length, dtype=torch.int64)}
        return step_of(module, batch, cp, 0)


class AlsoFrozen(MemTracker):
    """Torch's tracker without its hooks on parameters, which it puts on frozen ones, too, and fails."""

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)


class Peak(L.Callback):
    """The most that torch's tracker saw, in bytes, from the first batch on."""

    def __init__(self) -> None:
        self.tracker = AlsoFrozen()
        self.seen = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.tracker.track_external(pl_module)
        self.tracker.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.tracker.reset_mod_stats()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.tracker.__exit__(None, None, None)
        (snapshot,) = self.tracker.get_tracker_snapshot("peak").values()
        self.seen = snapshot["Total"]


def measure_peaks(runs: list[Run]) -> list[int]:
    """On a rank."""
    peaks = []
    for run in runs:
        L.seed_everything(7, verbose=False)
        seen = Peak()
        fit(run, seen)
        peaks.append(seen.seen)
    return peaks
