"""A LightningModule that holds its blocks itself, without a model around them: each block is called from outside."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_moe_ep import MoEEPStrategy
from tests.models import ADAM_EPS, HIDDEN, Block, make_batch
from tests.parity import trainer, whole, worst
from tests.pool import RankPool

STEPS, MICRO_BATCHES = 3, 4


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.resharded: list[bool] = []

    def configure_model(self) -> None:
        make = {"num_experts": 8, "top_k": 2, "intermediate_size": 48}
        self.blocks = nn.ModuleList([Block(**make), Block(**make)])
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def train_dataloader(self) -> Any:
        share = self.trainer.accumulate_grad_batches
        mine = range(self.trainer.global_rank * share, (self.trainer.global_rank + 1) * share)
        batches = [make_batch("own", 16, seed=10 * step + micro) for step in range(STEPS) for micro in mine]
        return DataLoader(batches, batch_size=None)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = batch["x"]
        for block in self.blocks:
            hidden = block(hidden)
        loss = (self.head(hidden) - batch["y"]).pow(2).mean() * 10
        self.resharded += [isinstance(p, DTensor) for block in self.blocks for p in block.parameters()]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=ADAM_EPS)


def train(ep: int) -> tuple[dict[str, Tensor], list[bool]]:
    """On a rank: the weights at the end, and whether the blocks were sharded between forward and backward."""
    L.seed_everything(7, verbose=False)
    module = Module()
    share = MICRO_BATCHES // dist.get_world_size()
    trainer(MoEEPStrategy(ep=ep), max_epochs=1, accumulate_grad_batches=share).fit(module)
    return whole(dict(module.named_parameters())), module.resharded


@pytest.mark.parametrize(("world", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_weights_equal_those_of_one_process(ranks: RankPool, world: int, ep: int) -> None:
    L.seed_everything(7, verbose=False)
    right = Module()
    L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=MICRO_BATCHES,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(right)
    for weights, resharded in ranks.run(train, ep, world=world):
        error, name = worst(weights, dict(right.named_parameters()))
        assert error < 1e-5, f"{name} is off by {error:.1e}"
        assert resharded and all(resharded)
