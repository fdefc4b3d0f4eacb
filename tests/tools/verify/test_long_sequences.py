"""At cp > 1 the one process has each cp group's batch once, with whole sequences; what is wrong there is named."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_moe_ep import CausalLMModule, MoEEPStrategy, load_balancing_loss
from lightning_moe_ep.tools.verify.compare import compare
from lightning_moe_ep.tools.verify.given import Given, Made, options_of
from lightning_moe_ep.tools.verify.measure import measure
from lightning_moe_ep.tools.verify.report import VerifyReport
from lightning_moe_ep.tools.verify.seen import Measured, joined
from tests.contract import contract
from tests.parity import PoolEnvironment
from tests.pool import RankPool
from tests.test_causal_lm import CONFIG


class Rows(Dataset[dict[str, Tensor]]):
    """Of an odd length, so that slices are padded."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 96, (9,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 5] = -100
        return {"input_ids": ids, "labels": labels}


class Right(CausalLMModule):
    def __init__(self) -> None:
        config = {**CONFIG, "output_router_logits": True, "router_aux_loss_coef": 0.1}
        super().__init__(config, learning_rate=1e-3, warmup_steps=1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(), batch_size=2)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        items = batch.pop("num_items_in_batch")  # a step may; each time that it is called with this batch
        return super().training_step({**batch, "num_items_in_batch": items}, batch_idx)


class MeanOfSlice(Right):
    """Takes the mean over the labels of each slice, as a module that knows nothing of cp would."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        batch = self.trainer.strategy.shard_sequences(batch)
        targets = batch.pop("shift_labels")
        logits = self.model(**{key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class DrawsInHook(Right):
    """Changes a token after the loader has given the batch, on each rank another."""

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        batch["input_ids"][0, 0] = self.global_rank
        return batch


class Own(Right):
    """Asks the strategy for what docs/long_sequences.md says: its load-balancing loss is over the cp group's tokens."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        strategy, length = self.trainer.strategy, batch["input_ids"].shape[1]
        items, micro_batches = batch.pop("num_items_in_batch"), batch.pop("num_micro_batches")
        batch = strategy.shard_sequences(batch)
        targets = batch.pop("shift_labels")
        output = self(batch)
        assert strategy.gather_sequences(output.logits, length=length).shape[1] == length
        total = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
        aux_loss = output.aux_loss
        if strategy.cp > 1:
            group = strategy.meshes.cp_mesh.get_group()
            aux_loss = load_balancing_loss(output.router_logits, 8, 2, batch["attention_mask"], group=group)
        accumulated = self.trainer.accumulate_grad_batches
        return accumulated * (total * self.trainer.world_size / items + 0.1 * aux_loss / micro_batches)


Run = tuple[type[Right], int, int, int]
"""The module, the ranks, cp and ep."""


def given(run: Run) -> Given:
    kind, world, cp, ep = run

    def make() -> Made:
        L.seed_everything(7, verbose=False)
        options = {"accelerator": "cpu", "devices": world, "plugins": [PoolEnvironment()], "max_steps": 3}
        options |= {"accumulate_grad_batches": 2}
        return Made(kind(), None, MoEEPStrategy(ep=ep, cp=cp), *options_of(options))

    return Given(make)


def on_rank(runs: tuple[Run, ...]) -> list[Measured | None]:
    return [measure(given(run)) for run in runs]


def reports(ranks: RankPool, *runs: Run) -> list[VerifyReport]:
    started = time.monotonic()
    measured = ranks.run(on_rank, runs, world=runs[0][1], timeout=150)[0]
    return [compare(given(run), seen, started=started) for run, seen in zip(runs, measured, strict=True)]


@contract("Models", "`lightning-moe-ep verify` at cp > 1")
def test_a_right_run_raises_no_alarm(ranks: RankPool) -> None:
    (report,) = reports(ranks, (Right, 2, 2, 2))
    assert report.right, report.text()
    assert report.layouts[0] == "(replicate 1, efsdp 1, ep 2, cp 2)"
    assert max(check.error for check in report.checks) < 1e-5


@pytest.mark.more
def test_what_is_wrong_is_named(ranks: RankPool) -> None:
    runs = (Right, 4, 2, 4), (Own, 4, 2, 2), (MeanOfSlice, 4, 2, 2), (DrawsInHook, 4, 2, 2)
    right, own, mean, draws = reports(ranks, *runs)
    assert right.right, right.text()
    assert own.right, own.text()
    assert "loss-wrong" in [fault.name for fault in mean.faults], mean.text()
    assert draws.faults[0].name == "unlike-batches", draws.text()
    assert draws.faults[0].text.startswith("ranks 0 and 1 are one cp group, but have unlike batches")


def test_choices_of_slices_are_joined() -> None:
    whole = torch.arange(2 * 5 * 3).view(2, 5, 3)
    padded = torch.cat([whole, torch.full((2, 1, 3), -1)], dim=1)
    slices = [[padded[:, :3].reshape(6, 3)] * 2, [padded[:, 3:].reshape(6, 3)] * 2]
    batch = {"input_ids": torch.zeros(2, 5)}
    for calls in (joined([batch], slices), joined([batch, batch], slices)):
        assert len(calls) == 2 and all(torch.equal(call, whole.flatten(0, 1)) for call in calls)
    assert joined([batch], [slices[0], [slices[1][0][:4]] * 2]) == [] == joined([(1, 2)], slices)
