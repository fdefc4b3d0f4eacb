"""Every layout that a world admits, what each needs, which fit, and which one is recommended.

What is known of a model, of its machine and of the run goes in; rows in order come out, the best first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import get_args

from lightning_moe_ep.activation_checkpointing import ActivationCheckpointing
from lightning_moe_ep.layout import Layout, divisors_of
from lightning_moe_ep.planning.estimate import Time, cost_of, time_of
from lightning_moe_ep.planning.exchange import Message
from lightning_moe_ep.planning.look import Look
from lightning_moe_ep.planning.machine import Machine
from lightning_moe_ep.planning.shapes import ModelShapes
from lightning_moe_ep.planning.wire import Step, Wire, fsdp_messages, layers_of, wire_of

DISPATCHERS = ("all_gather", "all_to_all", "overlapped")
"""Those whose bytes are known."""


@dataclass(frozen=True)
class Candidate:
    """A layout with the options of the strategy that memory and time depend on."""

    layout: Layout
    dispatcher: str
    """"-" at ep=1, where nothing is dispatched."""

    reshard: bool
    activation_checkpointing: ActivationCheckpointing

    def step(self, step: Step, tokens: int) -> Step:
        """The step with these options, in which a rank has `tokens` tokens."""
        return replace(
            step,
            tokens=tokens,
            dispatcher=self.dispatcher,
            reshard=self.reshard,
            activation_checkpointing=self.activation_checkpointing,
        )

    def __str__(self) -> str:
        cp = f" cp={self.layout.cp}," if self.layout.cp > 1 else ""
        dispatcher = f" dispatcher={self.dispatcher!r}," if self.layout.ep > 1 else ""
        return (
            f"ep={self.layout.ep}, replicate={self.layout.replicate},{cp}{dispatcher}"
            f" reshard_after_forward={self.reshard}, activation_checkpointing={self.activation_checkpointing!r}"
        )


@dataclass(frozen=True)
class Needs:
    """Bytes of device memory that the rank which needs most needs."""

    parameters: int
    gradients: int
    optimizer: int
    """State."""

    buffers: int
    offloaded: int
    """Of these, in memory of the host."""

    at_peak: dict[str, int]
    """What is on the device at the moment of a step at which most is, by what it is."""

    peak: int
    """All of that, with intermediate results of the optimizer."""

    where: str
    """That moment."""


@dataclass(frozen=True)
class Row:
    """What a candidate needs."""

    candidate: Candidate
    needs: Needs
    wire: Wire
    time: Time | None
    host_load: int | None
    """Bytes of the host that a rank has while a pretrained model is read; None: there is none."""

    too_large: str | None
    """Why it does not fit; None: it does, or the device's memory is not known."""


def candidates(shapes: ModelShapes, world: int, *, cp: int = 1) -> Iterator[Candidate]:
    """All that the world and the experts admit, at this cp."""
    common = gcd(*(experts.num_experts for experts in shapes.experts))
    for ep in divisors_of(gcd(common, world)):
        for replicate in divisors_of(world // ep):
            layout = Layout.for_world(world, ep=ep, replicate=replicate, cp=cp)
            for dispatcher in DISPATCHERS if ep > 1 else ("-",):
                # Where FSDP2 shards nothing there is nothing to free between forward and backward.
                for reshard in (True, False) if layout.fsdp > 1 else (True,):
                    # Without an exchange "selective" is "full".
                    for kept in get_args(ActivationCheckpointing) if ep > 1 else ("none", "full"):
                        yield Candidate(layout, dispatcher, reshard, kept)


def rows_of(
    shapes: ModelShapes,
    considered: Sequence[Candidate],
    *,
    step: Step,
    tokens_of: Callable[[Layout], int],
    look: Look,
    machine: Machine,
    devices_per_node: int,
    needs_of: Callable[[Candidate], Needs],
    host_load_of: Callable[[Layout], int] | None,
) -> list[Row]:
    """What each candidate needs, in order: those that fit first, the best of them at the top.

    Args:
        shapes: of the model.
        considered: the candidates.
        step: what a step is made of, but for what a candidate says.
        tokens_of: of a rank in a micro-batch.
        look: what a token computes.
        machine: what is known of it.
        devices_per_node: ranks of a node.
        needs_of: the memory of a candidate.
        host_load_of: the host's memory at load.
    """
    rows, layers = [], layers_of(shapes, look.routing)

    @cache
    def of_fsdp(layout: Layout, reshard: bool) -> tuple[Message, ...]:
        return tuple(fsdp_messages(shapes, layout, replace(step, reshard=reshard)))

    for candidate in considered:
        of_step = candidate.step(step, tokens_of(candidate.layout))
        wire = wire_of(
            shapes,
            candidate.layout,
            of_step,
            devices_per_node=devices_per_node,
            layers=layers,
            of_fsdp=of_fsdp(candidate.layout, candidate.reshard),
            attentions=look.attentions,
        )
        needs = needs_of(candidate)
        rows.append(
            Row(
                candidate,
                needs,
                wire,
                time=time_of(wire, look, of_step, machine),
                host_load=host_load_of(candidate.layout) if host_load_of else None,
                too_large=_too_large(needs, machine.usable),
            )
        )
    return sorted(rows, key=order)


def order(row: Row) -> tuple[float, ...]:
    """Rows that fit first; the best of them, for the same number of tokens, at the top."""
    kept = get_args(ActivationCheckpointing).index(row.candidate.activation_checkpointing)
    if row.too_large is not None:
        return 1, row.needs.peak
    # Without figures of the machine: what computes nothing twice, then what sends least.
    # Times cp: so many steps have as many sequences as one at cp=1.
    cp = row.candidate.layout.cp
    best = (row.time.middle * cp, kept) if row.time is not None else (float(kept), cost_of(row.wire) * cp)
    return 0, *best, row.needs.peak


def _too_large(needs: Needs, usable: int | None) -> str | None:
    if usable is None or needs.peak <= usable:
        return None
    largest = sorted(needs.at_peak.items(), key=lambda part: -part[1])[:2]
    of = ", ".join(f"{name} {size / 2**30:,.1f}" for name, size in largest)
    return f"{needs.peak / 2**30:,.1f} GiB of {usable / 2**30:,.1f}: {of}"


def reason_for(best: Row, rows: Sequence[Row]) -> str:
    """Why the first row is recommended, against the best of another ep or cp."""
    several = len({row.candidate.layout.cp for row in rows}) > 1
    others = [row for row in rows if _sizes(row) != _sizes(best)]
    other = next((row for row in others if row.too_large is None), None)
    if other is None:
        return f"no other ep{' or cp' if several else ''} {'fits' if others else 'is possible'}"
    ep, cp = _sizes(other)
    than = f"the best of ep={ep}{f', cp={cp}' if several else ''}"
    # A step has fewer sequences at a larger cp.
    share = cp / best.candidate.layout.cp
    for_as_many = "" if share == 1 else " for as many tokens"
    if best.time is not None and other.time is not None:
        return f"{best.time.middle:.3g} s a step, where {than} takes {other.time.middle * share:.3g} s{for_as_many}"
    if best.candidate.activation_checkpointing != other.candidate.activation_checkpointing:
        return f"it fits without computing anything twice, where {than} does not"
    ours, theirs = best.wire, other.wire
    return (
        f"a rank sends {ours.intra / 1e9:,.3g} GB inside and {ours.inter / 1e9:,.3g} GB between nodes a step; with"
        f" {than} {theirs.intra * share / 1e9:,.3g} and {theirs.inter * share / 1e9:,.3g} GB{for_as_many}"
    )


def _sizes(row: Row) -> tuple[int, int]:
    return row.candidate.layout.ep, row.candidate.layout.cp
