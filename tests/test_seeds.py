"""What makes a run repeat itself: torch's deterministic algorithms under the strategy's own operations.

That two runs of one command are equal bit for bit, with the loaders' workers, is shown in tests/launch.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor

from lightning_moe_ep import MoEEPStrategy
from tests.contract import contract
from tests.matrix import mostly_more
from tests.parity import Case, CaseModule, trainer
from tests.pool import RankPool


class Losses(CaseModule):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


def _train(case: Case, flags: dict[str, Any]) -> tuple[list[float], list[float], bool, bool]:
    """Losses, the final weights' sums, and whether torch was deterministic, also when the run had ended."""
    was = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    during = []

    class Watch(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            during.append(torch.are_deterministic_algorithms_enabled())

    try:
        L.seed_everything(7, verbose=False)
        module = Losses(case)
        runs = trainer(MoEEPStrategy(ep=case.ep, **case.strategy), max_epochs=1, callbacks=[Watch()], **flags)
        runs.fit(module)
        sums = [parameter.full_tensor().double().sum().item() for parameter in module.parameters()]
        return module.losses, sums, all(during), torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(was[0])
        torch.backends.cudnn.benchmark = was[1]


CASES = [
    (dispatcher, computation)
    for dispatcher in ("all_to_all", "all_gather", "three_chunks")
    for computation in ("grouped_mm", "loop")
]


@contract("Seeds", '`deterministic=True` and `"warn"`', "works: kept for the whole run; what it computes is the same")
@contract("Seeds", "`benchmark=True`", "works")
@pytest.mark.parametrize(
    ("dispatcher", "computation"), mostly_more(CASES, ("all_to_all", "grouped_mm"), ("all_gather", "loop"))
)
def test_deterministic(ranks: RankPool, dispatcher: str, computation: str) -> None:
    # Under it, memory that nobody has set holds NaN: nothing may be computed from that. Ranks have unequal tokens.
    case = Case(steps=3, tokens=((16,), (5,)), strategy={"dispatcher": dispatcher, "computation": computation})
    plain = ranks.run(_train, case, {}, world=2)
    assert [result[2:] for result in plain] == [(False, False)] * 2
    for flags in ({"deterministic": True}, {"deterministic": "warn"}, {"benchmark": True}):
        runs = ranks.run(_train, case, flags, world=2)
        assert [result[:2] for result in runs] == [result[:2] for result in plain]
        assert [result[2:] for result in runs] == [("deterministic" in flags,) * 2] * 2
