"""Runs a case on the pool's ranks through a real Trainer, and compares with the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_moe_ep import ExpertGradientCallback, MoEEPStrategy, register_dispatcher
from lightning_moe_ep.dispatch import OverlappedDispatcher
from lightning_moe_ep.experts import to_plain
from tests import oracle
from tests.models import ADAM_EPS, NOTHING, build, freeze, loss_of, make_batch
from tests.pool import RankPool


@register_dispatcher("three_chunks")
class ThreeChunks(OverlappedDispatcher):
    """`overlapped` with chunks however few tokens there are."""

    def num_chunks(self, num_tokens: int) -> int:
        return 3


class PoolEnvironment(ClusterEnvironment):
    """The pool's ranks as a cluster, with the process group that they have already."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


def trainer(strategy: MoEEPStrategy | str | None = None, **options: Any) -> L.Trainer:
    """A quiet Trainer over all ranks of the job."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    plugins = [PoolEnvironment(), *options.pop("plugins", [])]
    return L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy if strategy is not None else MoEEPStrategy(),
        use_distributed_sampler=options.pop("use_distributed_sampler", False),
        plugins=plugins,
        **{**quiet, **options},
    )


@dataclass(frozen=True)
class Case:
    """One training run."""

    kind: str = "own"
    model: dict[str, Any] = field(default_factory=dict)
    ep: int = 2
    world: int = 2
    replicate: int = 1
    steps: int = 1
    tokens: tuple[tuple[int, ...], ...] = ((16,),)
    """Tokens of each micro-batch of a step, by rank; the last entry stands for all further ranks."""
    clip: float | None = None
    norm_type: float = 2.0
    precision: Any = "32-true"
    strategy: dict[str, Any] = field(default_factory=dict)
    frozen: str = NOTHING
    """A pattern of the names of parameters that are not trained."""

    def batches(self) -> list[list[list[dict[str, Tensor]]]]:
        """`[step][rank][micro-batch]`."""
        return [
            [
                [
                    make_batch(self.kind, tokens, seed=1000 * step + 10 * rank + micro)
                    for micro, tokens in enumerate(self.tokens[min(rank, len(self.tokens) - 1)])
                ]
                for rank in range(self.world)
            ]
            for step in range(self.steps)
        ]


class CaseModule(L.LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def configure_model(self) -> None:
        self.model = build(self.case.kind, **self.case.model)
        freeze(self.model, self.case.frozen)

    def train_dataloader(self) -> Any:
        batches = [batch for step in self.case.batches() for batch in step[dist.get_rank()]]
        return DataLoader(batches, batch_size=None)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=ADAM_EPS)


class Probe(L.Callback):
    """Keeps the whole gradients and the norms that a step sees."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.norms: list[float] = []
        self.initial: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.initial = plain(pl_module.model, dict(pl_module.model.named_parameters()))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        trained = {name: p.grad for name, p in pl_module.model.named_parameters() if p.requires_grad}
        missing = [name for name, gradient in trained.items() if gradient is None]
        assert not missing, f"no gradient: {missing}"
        needless = [
            name for name, p in pl_module.model.named_parameters() if name not in trained and p.grad is not None
        ]
        assert not needless, f"a gradient that nobody needs: {needless}"
        self.gradients.append(plain(pl_module.model, trained))

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step > len(self.norms):
            self.norms.append(float(trainer.callback_metrics["grad_norm"]))


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors.items()}


def plain(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of a parallel model's parameters, in the form that they have in the plain model."""
    # A stand-in for a module that holds its layers itself has no more than their parameters.
    return to_plain(model, whole(tensors)) if isinstance(model, torch.nn.Module) else whole(tensors)


def train(case: Case) -> tuple[dict[str, Tensor], oracle.Answer]:
    """On a rank: the initial weights, and what came of the run."""
    L.seed_everything(7, verbose=False)
    probe = Probe()
    module = CaseModule(case)
    accumulate = len(case.tokens[0])
    trainer(
        MoEEPStrategy(ep=case.ep, replicate=case.replicate, **case.strategy),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=case.clip,
        precision=case.precision,
        callbacks=[probe, ExpertGradientCallback(norm_type=case.norm_type)],
    ).fit(module)
    weights = plain(module.model, dict(module.model.named_parameters()))
    return probe.initial, oracle.Answer(probe.gradients, probe.norms, weights)


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference, as a share of the largest value of its tensor, and where it is."""
    assert ours.keys() == theirs.keys()
    return max(
        (float((ours[n].float() - theirs[n].float()).abs().max() / theirs[n].abs().max().clamp(min=1e-30)), n)
        for n in theirs
    )


def check(pool: RankPool, case: Case) -> None:
    """Run the case and compare with the oracle: gradients to 1e-5, norms to 1e-6, weights to 1e-4."""
    results = pool.run(train, case, world=case.world)
    initial, ours = results[0]
    theirs = oracle.answer(
        case.kind, case.model, initial, case.batches(), clip=case.clip, norm_type=case.norm_type, frozen=case.frozen
    )
    for step, (mine, right) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        error, name = worst(mine, right)
        assert error < 1e-5, f"step {step}: the gradient of {name} is off by {error:.1e}"
    for _, answer in results:
        assert answer.norms == ours.norms, "ranks disagree on the norm"
    for mine_norm, right_norm in zip(ours.norms, theirs.norms, strict=True):
        assert abs(mine_norm - right_norm) <= 1e-6 * right_norm, f"norm {mine_norm} instead of {right_norm}"
    error, name = worst(ours.weights, theirs.weights)
    assert error < 1e-4, f"the weight {name} is off by {error:.1e}"
