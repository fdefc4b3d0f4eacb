"""A fault in a strategy is named, and no other; a run without one raises no alarm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import pytest

from lightning_moe_ep import MoEEPStrategy
from lightning_moe_ep.tools.verify.compare import compare
from lightning_moe_ep.tools.verify.given import Given, Made, options_of
from lightning_moe_ep.tools.verify.measure import measure
from lightning_moe_ep.tools.verify.seen import Measured
from lightning_moe_ep.tools.verify.report import VerifyReport
from tests.parity import PoolEnvironment
from tests.pool import RankPool
from tests.tools.verify.planted import PLANTED, Regression


def given(strategy: type[MoEEPStrategy], ep: int, options: dict[str, Any], **of_strategy: Any) -> Given:
    """A run as it would be read from a configuration."""

    def make() -> Made:
        L.seed_everything(7, verbose=False)
        of_trainer = {"accelerator": "cpu", "plugins": [PoolEnvironment()], "max_steps": 3, **options}
        return Made(Regression(), None, strategy(ep=ep, **of_strategy), *options_of(of_trainer))

    return Given(make)


def on_rank(strategies: Sequence[type[MoEEPStrategy]], ep: int, options: dict[str, Any]) -> list[Measured | None]:
    return [measure(given(strategy, ep, options)) for strategy in strategies]


def reports(
    ranks: RankPool, strategies: Sequence[type[MoEEPStrategy]], *, world: int, ep: int, **options: Any
) -> list[VerifyReport]:
    options["devices"] = world
    started = time.monotonic()
    measured = ranks.run(on_rank, strategies, ep, options, world=world, timeout=50)[0]
    return [
        compare(given(strategy, ep, options), of_one, started=started)
        for strategy, of_one in zip(strategies, measured, strict=True)
    ]
