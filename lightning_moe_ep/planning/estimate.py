"""How long an optimizer step takes, from bytes, operations and what the machine can do; nothing where that is unknown.

Two bounds: `slowest`, where nothing runs beside anything else, and `fastest`, where FSDP2's collectives run beside the
computation whenever one of both is going on, and those of `overlapped` beside the experts' as far as its chunks allow.
What a step does beside (the optimizer, loading data, kernels that are not matrix products) is in neither, but for the
share of the vendor's figure that is taken to be reached.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_moe_ep.dispatch.overlapped import CHUNKS
from lightning_moe_ep.planning.exchange import num_chunks
from lightning_moe_ep.planning.look import Look
from lightning_moe_ep.planning.machine import Machine
from lightning_moe_ep.planning.wire import Step, Wire

BETWEEN = 9
"""How much slower a byte is between nodes than inside, where no figures are given: as with H100s in the vendor's node.
Only for putting layouts in an order."""


@dataclass(frozen=True)
class Time:
    """Seconds of an optimizer step."""

    compute: float
    fsdp: float
    """Of weights gathered and gradients reduced."""

    exchange: float
    """Of tokens, to experts and back."""

    attention: float
    """Of tokens and heads among the ranks that hold slices of the same sequences."""

    fastest: float
    slowest: float

    @property
    def middle(self) -> float:
        """Between the bounds: what layouts are put in an order by."""
        return (self.fastest + self.slowest) / 2


def time_of(wire: Wire, look: Look, step: Step, machine: Machine) -> Time | None:
    """The time of a step; None: the machine's operations or bandwidths a second are not known.

    Args:
        wire: what a rank sends.
        look: what a token computes.
        step: what the step is made of.
        machine: its figures.
    """
    if machine.flops is None or machine.intra is None or (machine.inter is None and wire.inter):
        return None
    # Backward computes twice what forward does, and once more what is not kept.
    passes = 3 if step.activation_checkpointing == "none" else 4
    tokens = step.tokens * step.micro_batches
    compute = passes * tokens * look.flops / machine.flops
    of_experts = passes * tokens * look.expert_flops / machine.flops
    fsdp, exchange, attention = (
        intra / machine.intra + (inter / machine.inter if machine.inter else 0) + calls * machine.latency
        for intra, inter, calls in (wire.of("fsdp", "efsdp", "replicate", "world"), wire.of("ep"), wire.of("cp"))
    )
    hidden = 0.0
    if num_chunks(step.dispatcher, step.tokens) > 1:
        # While experts work on one chunk another is on its way; the first one's way is waited for.
        hidden = min(exchange, of_experts) * (CHUNKS - 1) / CHUNKS
    return Time(
        compute=compute,
        fsdp=fsdp,
        exchange=exchange,
        attention=attention,
        fastest=max(compute, fsdp) + exchange - hidden + attention,
        slowest=compute + fsdp + exchange + attention,
    )


def cost_of(wire: Wire) -> float:
    """Bytes, those between nodes weighed by `BETWEEN`: an order of layouts where no figures are given."""
    return wire.intra + BETWEEN * wire.inter
