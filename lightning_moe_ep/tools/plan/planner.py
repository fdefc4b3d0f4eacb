"""`plan`: what a run will need at every layout of a world, before there is one.

The model is built on the meta device and asked for its shapes; all layouts are worked out from them, and the one that
is recommended is then built as a rank of that world would have it, which must come to the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_moe_ep.dispatch.auto import costs
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.precision import FSDP2Precision
from lightning_moe_ep.tools.plan.activations import CausalLM
from lightning_moe_ep.tools.plan.exact import resident_exactly
from lightning_moe_ep.tools.plan.layouts import DISPATCHERS, Candidate, Row, candidates, reason_for, rows_of
from lightning_moe_ep.tools.plan.load import Loading
from lightning_moe_ep.tools.plan.look import look_at
from lightning_moe_ep.tools.plan.machine import Machine
from lightning_moe_ep.tools.plan.report import Plan
from lightning_moe_ep.tools.plan.shapes import ExpertsShape, ModelShapes, shapes_of
from lightning_moe_ep.tools.plan.states import observe_states
from lightning_moe_ep.tools.plan.wire import Step, sum_dtypes

_PASSED_ON = ("computation", "combine_dtype", "cpu_offload", "fp32_modules")
"""Options of the strategy that a plan takes as they are."""


def plan(
    build: Callable[[], nn.Module],
    *,
    world: int,
    devices_per_node: int = 8,
    sequences: int,
    length: int,
    precision: str = "32-true",
    micro_batches: int = 1,
    strategy: Mapping[str, Any] | None = None,
    machine: Machine | None = None,
    confirm: bool = True,
) -> Plan:
    """What a run needs at every layout, which layouts fit, and which one is best.

    No process group is made in this process, and none that it has is disturbed: what needs one runs in another, which
    `build` is sent to.

    Args:
        build: makes the plain model, or a LightningModule with its model, on the meta device; a function of a module
            that can be imported, or a `functools.partial` of one.
        world: how many ranks there will be.
        devices_per_node: ranks of a node.
        sequences: of a micro-batch on one rank.
        length: tokens of each.
        precision: the Trainer's.
        micro_batches: accumulated before the optimizer steps.
        strategy: the arguments of `MoEEPStrategy`; its layout is looked at beside all others, and options that no
            layout changes hold for all.
        machine: what is known of it; without figures there is no time, without its memory everything fits.
        confirm: whether the layout that is recommended is built, which must come to the same bytes.

    Raises:
        NoExpertsError: the model has no experts module.
        ValueError: something is not positive, or the model cannot be planned; says why.
        RuntimeError: what was built has other bytes than were worked out: a fault of this library.
    """
