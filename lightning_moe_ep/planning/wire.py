"""Bytes that a rank sends to others in an optimizer step, and to which: of its node, or of another.

The shapes of a model, a layout and the options of the strategy go in; the messages of FSDP2, of the dispatcher and of
the optimizer boundary come out, as the run will hand them to its collectives. All ranks send alike, but for what
routing decides; where nodes cut groups unevenly, the rank with the fewest neighbours is meant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from lightning_moe_ep.activation_checkpointing import ActivationCheckpointing
from lightning_moe_ep.dispatch import CombineDtype
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.planning.exchange import (
    Exchanged,
    Group,
    Message,
    Rows,
    all_gather,
    all_to_all,
    num_chunks,
    uniform_rows,
)
from lightning_moe_ep.planning.sequences import Attention, exchanges, told
from lightning_moe_ep.planning.shapes import ExpertsShape, ModelShapes, ParameterShape, UnitShape, part_of

NORM_BYTES = 16
"""Of the norm of the gradients: one float64 of the dense part, one of the experts'."""


@dataclass(frozen=True)
class Step:
    """What an optimizer step is made of, beside the layout."""

    tokens: int
    """Tokens of a rank in a micro-batch; of the rank that has most."""

    micro_batches: int = 1
    """Accumulated before the optimizer steps."""

    reduce_every_micro_batch: bool = False
    reshard: bool = True
    """`reshard_after_forward`."""

    dispatcher: str = "all_to_all"
    """"all_gather", "all_to_all" or "overlapped"."""

    combine_dtype: CombineDtype = "auto"
    activation_checkpointing: ActivationCheckpointing = "none"
    cpu_offload: bool = False
    takes_norm: bool = True
    """Whether the norm of the gradients is computed, to clip by or for the log."""


@dataclass(frozen=True)
class Routing:
    """What is known of an experts module beside its shapes, from a look at its model's forward."""

    weight_bytes: int
    """Of a routing weight."""

    returns_again: bool
    """Whether something of its block after the experts is kept for backward, so that recomputing comes to it."""


@dataclass(frozen=True)
class Wire:
    """What a rank sends in an optimizer step."""

    messages: tuple[Message, ...]

    inside: Mapping[tuple[Group, bool], float]
    """By the group, and whether it is an all-to-all: the share of a message that stays in the rank's node."""

    @property
    def intra(self) -> float:
        """Bytes to other ranks of its node."""
        return sum(self._intra(message) for message in self.messages)

    @property
    def inter(self) -> float:
        """Bytes to other nodes."""
        return sum(message.nbytes - self._intra(message) for message in self.messages)

    def _intra(self, message: Message) -> float:
        return message.nbytes * self.inside[message.group, message.collective == "all_to_all"]

    def of(self, *groups: Group) -> tuple[float, float, int]:
        """Bytes inside and between nodes, and collectives, of what is sent over any of these groups."""
        messages = [message for message in self.messages if message.group in groups]
        intra = sum(map(self._intra, messages))
        return intra, sum(message.nbytes for message in messages) - intra, sum(message.calls for message in messages)

    @property
    def nbytes(self) -> float:
        return sum(message.nbytes for message in self.messages)

    def messages_by_kind(self) -> list[Message]:
        """The messages of all units and layers, added up by what, when and how they are sent."""
        kinds: dict[tuple[str, str, str, str], list[Message]] = {}
        for message in self.messages:
            kinds.setdefault((message.what, message.phase, message.group, message.collective), []).append(message)
        return [
            replace(of_kind[0], nbytes=sum(m.nbytes for m in of_kind), calls=sum(m.calls for m in of_kind))
            for of_kind in kinds.values()
        ]

    def where(self, accept: Callable[[Message], bool]) -> float:
        """Bytes of some of the messages."""
        return sum(message.nbytes for message in self.messages if accept(message))


def wire_of(
    shapes: ModelShapes,
    layout: Layout,
    step: Step,
    *,
    devices_per_node: int,
    layers: Mapping[str, Exchanged],
    rows: Mapping[str, Rows] | None = None,
    of_fsdp: Sequence[Message] | None = None,
    attentions: Sequence[Attention] = (),
) -> Wire:
    """What a rank sends in one optimizer step.

    Not counted: what goes over the host (`host_calls`), and what a module sends by itself, such as values logged with
    `sync_dist` and the sums of the global load-balancing loss.

    Args:
        shapes: of the model.
        layout: of the ranks.
        step: the strategy's options and the tokens.
        devices_per_node: ranks of a node, which are consecutive.
        layers: what each experts module exchanges, by its name; see `layers_of`.
        rows: by the experts module's name, what one micro-batch routes to other ranks; None: uniform routing.
        of_fsdp: what `fsdp_messages` has found for this layout and this `reshard`, if it has been asked.
        attentions: of the model, for cp > 1.
    """
    messages: list[Message] = list(fsdp_messages(shapes, layout, step) if of_fsdp is None else of_fsdp)
    if layout.ep > 1:
        for experts in shapes.experts:
            once = _of_experts(layers[experts.name], layout, step, None if rows is None else rows[experts.name])
            messages += (_times(message, step.micro_batches) for message in once)
    if layout.cp > 1:
        messages += (_times(message, step.micro_batches) for message in _of_attentions(attentions, layout, step))
    messages += _of_boundary(shapes, layout, step)
    messages = [message for message in messages if message.nbytes]
    groups = {message.group for message in messages}
    inside = {
        (group, everyone): _share_inside(group, layout, devices_per_node, to_everyone=everyone)
        for group in groups
        for everyone in (False, True)
    }
    return Wire(tuple(messages), inside)


def host_calls(shapes: ModelShapes, layout: Layout, step: Step, *, equal_tokens: bool) -> int:
    """How often ranks tell each other, over the host and in a few bytes, how many tokens they have, in a step."""
    if layout.ep == 1 or step.dispatcher == "all_to_all":
        return 0
    return step.micro_batches * sum(not (equal_tokens and experts.equal_tokens) for experts in shapes.experts)


def layers_of(shapes: ModelShapes, routing: Mapping[str, Routing]) -> dict[str, Exchanged]:
    """What each experts module exchanges, by its name.

    Args:
        shapes: of the model.
        routing: by the experts module's name, what its routing is like; of those that are not named, it is taken that
            weights have the dtype of the rows, and that something after the experts is kept for backward.

    Raises:
        ValueError: K or the width of the rows is not known of a module.
    """
    return {experts.name: _exchanged(shapes, experts, routing.get(experts.name)) for experts in shapes.experts}


def _exchanged(shapes: ModelShapes, experts: ExpertsShape, routing: Routing | None) -> Exchanged:
    if experts.top_k is None or experts.hidden_size is None:
        raise ValueError(
            f"how many experts a token of {experts.name} has, or how wide its rows are, is not to be seen in its router"
            " or in a config; give the router an attribute top_k and a weight [E, H]"
        )
    # A router is registered before or after its experts; it works on what they are given.
    inside = f"{experts.name.rpartition('.')[0]}."
    first = next(number for number, p in enumerate(shapes.parameters) if p.experts == experts.name)
    hidden = any(p.trained for p in shapes.parameters[:first] if p.experts is not None or not p.name.startswith(inside))
    weights = hidden or any(p.trained for p in shapes.parameters if p.experts is None and p.name.startswith(inside))
    return Exchanged(
        num_experts=experts.num_experts,
        top_k=experts.top_k,
        hidden_size=experts.hidden_size,
        row_bytes=experts.dtype.itemsize,
        weight_bytes=routing.weight_bytes if routing else experts.dtype.itemsize,
        hidden_has_gradient=hidden,
        weights_have_gradient=weights,
        is_trained=weights or any(p.trained for p in shapes.parameters if p.experts == experts.name),
        returns_again=routing.returns_again if routing else True,
    )


def _of_attentions(attentions: Sequence[Attention], layout: Layout, step: Step) -> Iterator[Message]:
    yield told(step.tokens, cp=layout.cp)
    recomputed = step.activation_checkpointing == "full"
    for attention in attentions:
        yield from exchanges(attention, step.tokens, cp=layout.cp, recomputed=recomputed)


def _times(message: Message, number: int) -> Message:
    return replace(message, nbytes=message.nbytes * number, calls=message.calls * number)


def _of_experts(layer: Exchanged, layout: Layout, step: Step, rows: Rows | None) -> Iterator[Message]:
    recomputed = step.activation_checkpointing == "full"
    if step.dispatcher == "all_gather":
        return all_gather(layer, step.tokens, ep=layout.ep, combine_dtype=step.combine_dtype, recomputed=recomputed)
    return all_to_all(
        layer,
        rows or uniform_rows(step.tokens, ep=layout.ep, num_experts=layer.num_experts, top_k=layer.top_k),
        ep=layout.ep,
        combine_dtype=step.combine_dtype,
        recomputed=recomputed,
        chunks=num_chunks(step.dispatcher, step.tokens),
    )


@dataclass(frozen=True)
class _Shards:
    """The parameters that FSDP2 gathers and reduces in one collective."""

    unit: UnitShape
    is_expert: bool
    ranks: int
    gathered: int
    """Bytes of a rank's part, padded."""

    reduced: int
    """Bytes of a rank's part of what is trained of it, padded."""


def _groups_of(shapes: ModelShapes, layout: Layout, step: Step, unit: UnitShape) -> list[_Shards]:
    """Of a unit: the dense ones, and at ep > 1 those of experts."""
    found: dict[bool, list[ParameterShape]] = {}
    for parameter in shapes.of_unit(unit.name):
        if shapes.by_fsdp(parameter, layout, cpu_offload=step.cpu_offload):
            found.setdefault(parameter.experts is not None and layout.ep > 1, []).append(parameter)
    groups = []
    for is_expert, parameters in sorted(found.items()):
        parts = [part_of(p, shapes, layout, cpu_offload=step.cpu_offload) for p in parameters]
        gathered = sum(
            part.padded * (unit.gathered or p.dtype).itemsize for p, part in zip(parameters, parts, strict=True)
        )
        reduced = sum(
            part.padded * (unit.reduced or unit.gathered or p.dtype).itemsize
            for p, part in zip(parameters, parts, strict=True)
            if p.trained
        )
        groups.append(_Shards(unit, is_expert, layout.efsdp if is_expert else layout.fsdp, gathered, reduced))
    return groups


def fsdp_messages(shapes: ModelShapes, layout: Layout, step: Step) -> Iterator[Message]:
    """What FSDP2 sends: the same whatever dispatches tokens, and whatever is computed twice."""
    units = [(unit, _groups_of(shapes, layout, step, unit)) for unit in shapes.units]
    reductions = step.micro_batches if step.reduce_every_micro_batch else 1
    again = _gathered_in_backward(shapes, units) if step.reshard else set()
    for unit, groups in units:
        for number, group in enumerate(groups):
            kind = "experts" if group.is_expert else "weights"
            over: Group = "efsdp" if group.is_expert else "fsdp"
            others, copies = group.ranks - 1, layout.replicate
            if others:
                nbytes = others * group.gathered * step.micro_batches
                gathered = Message(f"{kind} gathered", "forward", over, nbytes, "all_gather", step.micro_batches)
                yield gathered
                if (unit.name, number) in again:
                    yield replace(gathered, phase="backward")
                nbytes = others * group.reduced * reductions
                yield Message(f"{kind} reduced", "backward", over, nbytes, "reduce_scatter", reductions)
            if copies > 1:
                nbytes = 2 * group.reduced * (copies - 1) // copies * reductions
                yield Message(f"{kind} reduced", "backward", "replicate", nbytes, "all_reduce", reductions)


def _gathered_in_backward(
    shapes: ModelShapes, units: Iterable[tuple[UnitShape, list[_Shards]]]
) -> set[tuple[str, int]]:
    """The groups that FSDP2 gathers once more in backward: each that backward comes to, and the one it fetches ahead.

    Backward comes to a unit if something of it, or before it, is trained. A root keeps what it has gathered.
    """
    first_trained = next((n for n, p in enumerate(shapes.parameters) if p.trained), len(shapes.parameters))
    last = {p.unit: n for n, p in enumerate(shapes.parameters)}
    again: set[tuple[str, int]] = set()
    before: tuple[UnitShape, list[_Shards]] | None = None
    for unit, groups in units:
        comes = last.get(unit.name, -1) >= first_trained
        if comes and unit.role != "root":
            again |= {(unit.name, number) for number in range(len(groups))}
        if comes and unit.role == "block" and before is not None:
            ahead = range(len(before[1]))
            again |= {(before[0].name, number) for number in (ahead if len(groups) > 1 else ahead[-1:])}
        if unit.role == "block":
            before = unit, groups
    return again


def _of_boundary(shapes: ModelShapes, layout: Layout, step: Step) -> Iterator[Message]:
    world = layout.world
    reductions = step.micro_batches if step.reduce_every_micro_batch else 1
    whole = sum(p.numel for p in shapes.of_unit(None) if p.trained) * torch.float32.itemsize
    nbytes = 2 * whole * (world - 1) // world * reductions
    yield Message("whole parameters averaged", "backward", "world", nbytes, "all_reduce", reductions)
    if step.takes_norm:
        yield Message("norm", "step", "world", 2 * NORM_BYTES * (world - 1) // world, "all_reduce")


def _share_inside(group: Group, layout: Layout, devices_per_node: int, *, to_everyone: bool) -> float:
    """What share of a message over `group` stays in a rank's node.

    Where each rank sends to each other, that is the share of those in its node. A ring that is laid node by node
    crosses from each node to the next once, for all of its m ranks there: of what such a rank sends, the m-th part
    leaves the node, and all of it if it is alone there.
    """
    stride, size = {
        "ep": (1, layout.ep),
        "cp": (1, layout.cp),
        "efsdp": (layout.ep, layout.efsdp),
        "fsdp": (1, layout.fsdp),
        "replicate": (layout.fsdp, layout.replicate),
        "world": (1, layout.world),
    }[group]
    neighbours = _fewest_neighbours(stride, size, layout.world, devices_per_node)
    if neighbours == size:
        return 1.0
    return (neighbours - 1) / (size - 1) if to_everyone else 1 - 1 / neighbours


@cache
def _fewest_neighbours(stride: int, size: int, world: int, devices_per_node: int) -> int:
    """How many ranks of a group are on one node, where they are fewest: of groups of `size` ranks, `stride` apart."""
    groups = Counter((rank // (stride * size), rank % stride, rank // devices_per_node) for rank in range(world))
    return min(groups.values())
