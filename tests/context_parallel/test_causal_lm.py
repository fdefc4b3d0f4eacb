"""`CausalLMModule` on slices of sequences: it computes, logs and predicts what one process does with the whole."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe_ep import CausalLMModule, MoEEPStrategy
from tests.parity import Probe, trainer, worst
from tests.pool import RankPool
from tests.test_causal_lm import CONFIG, Logged, make_batch, pack

COEFFICIENT = 0.5


def batch_of(rows: int, length: int, *, unlabelled: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(10 * rows + length))
    labels = ids.clone()
    labels[:, :unlabelled] = -100
    return {"input_ids": ids, "labels": labels}


def padded(rows: int, length: int) -> dict[str, Tensor]:
    """The first row begins with padding, the last ends with it."""
    batch = batch_of(rows, length)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, : length // 3] = 0
    mask[-1, length // 2 :] = 0
    batch["labels"][mask == 0] = -100
    return {**batch, "attention_mask": mask}


def micro_batches() -> list[dict[str, Tensor]]:
    """Of one step: even and odd lengths, an empty one, packed and padded ones, a slice that is all padding."""
    return [
        batch_of(2, 8),
        batch_of(1, 7, unlabelled=3),
        batch_of(0, 8),
        pack({key: value[:, :5] for key, value in make_batch(3, 0, seed=5).items()}),
        padded(2, 9),
        batch_of(1, 1),
    ]


def loader(batches: list[Any], cp: int) -> DataLoader:
    """Batches of this rank's group, as every so many-th is another's."""
    groups, mine = dist.get_world_size() // cp, dist.get_rank() // cp
    return DataLoader(batches[mine::groups], batch_size=None)


def _everything(cp: int, ep: int, of_strategy: dict[str, Any]) -> dict[str, Any]:
    """On a rank: a step with each load-balancing loss, validation, predictions."""
    found: dict[str, Any] = {}
    losses = {
        "none": {},
        "global": {"config": {**CONFIG, "router_aux_loss_coef": COEFFICIENT}, "aux_loss": "global"},
        "local": {"config": {**CONFIG, "output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}},
    }
    for name, options in losses.items():
        L.seed_everything(7, verbose=False)
        probe, logged = Probe(), Logged()
        module = CausalLMModule(**{"config": CONFIG, **options})
        batches = micro_batches()
        fitting = trainer(
            MoEEPStrategy(ep=ep, cp=cp, **of_strategy),
            max_epochs=1,
            accumulate_grad_batches=len(batches) * cp // dist.get_world_size(),
            callbacks=[probe, logged],
        )
        fitting.fit(module, loader(batches, cp))
        found[name] = (probe.gradients[0], logged.values[0])
    (metrics,) = fitting.validate(module, loader(micro_batches(), cp), verbose=False)
    found["val_loss"] = metrics["val_loss"]
    found["predictions"] = fitting.predict(module, loader(micro_batches(), cp))
    return found


@pytest.mark.parametrize(
    ("world", "cp", "ep", "of_strategy"),
    [
        (2, 2, 2, {}),
        pytest.param(4, 2, 4, {}, marks=pytest.mark.more),
        pytest.param(4, 4, 2, {"activation_checkpointing": "selective", "replicate": 2}, marks=pytest.mark.more),
    ],
    ids=["cp2-ep2", "cp2-ep4", "cp4-ep2"],
)
def test_all_is_as_in_one_process(ranks: RankPool, world: int, cp: int, ep: int, of_strategy: dict[str, Any]) -> None:
    (right,) = ranks.run(_everything, 1, 1, {}, world=1)
    of_ranks = ranks.run(_everything, cp, ep, of_strategy, world=world)
    assert abs(right["local"][1]["grad_norm"] - right["none"][1]["grad_norm"]) > 1e-3, "no load-balancing loss"
    for found in of_ranks:
        for name in ("none", "local", "global"):
            if world > cp and name == "global":
                continue  # its micro-batches are those of all groups
            error, parameter = worst(found[name][0], right[name][0])
            assert error < 1e-5, f"{name}: the gradient of {parameter} is off by {error:.1e}"
            for metric in ("train_loss", "grad_norm"):
                assert found[name][1][metric] == pytest.approx(right[name][1][metric], rel=1e-6), (name, metric)
        assert found["val_loss"] == pytest.approx(right["val_loss"], rel=1e-6)
    groups = [of_ranks[first]["predictions"] for first in range(0, world, cp)]
    assert not any(of_ranks[rank]["predictions"] for rank in range(world) if rank % cp), "a sample was predicted twice"
    for number, whole in enumerate(right["predictions"]):
        mine = groups[number % len(groups)][number // len(groups)]
        assert mine.shape == micro_batches()[number]["input_ids"].shape
        real = micro_batches()[number].get("attention_mask", torch.ones_like(mine)) != 0
        assert torch.equal(mine[real], whole[real])
