"""From a run as it is given to a report: measured on all ranks, computed anew by one."""

from __future__ import annotations

import time

from lightning_moe_ep.tools.verify.given import Given
from lightning_moe_ep.tools.verify.judge import is_explained, judge
from lightning_moe_ep.tools.verify.report import VerifyReport
from lightning_moe_ep.tools.verify.seen import Measured
from lightning_moe_ep.tools.verify.single import answer


def compare(given: Given, measured: Measured, *, started: float) -> VerifyReport:
    """Judge what was measured; in one process, that is in no process group any more.

    Args:
        given: the run.
        measured: what `measure` gave rank 0.
        started: when it began, by `time.monotonic`.

    Raises:
        ValueError: the run's loss is another each time that it is asked.
    """
    single = answer(
        given,
        measured,
        device=measured.device,
        explained=lambda right, phase: is_explained(phase.step.gradients, right),
    )
    verdict = judge(measured, single)
    return VerifyReport(
        layouts=[str(phase.layout) for phase in measured.phases],
        device=measured.device.type,
        parameters=sum(tensor.numel() for tensor in measured.phases[0].step.before.values()),
        changes=measured.changes,
        checks=verdict.checks,
        faults=verdict.faults,
        seconds=time.monotonic() - started,
    )
