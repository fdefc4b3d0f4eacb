"""The most memory that a rank needs at any moment of a step: a walk through it, block by block.

A model in a layout and the trace of its activations go in; the moment at which most is alive comes out, with what is
alive then. FSDP2's buffers come and go as in torch 2.13: in forward an all-gather's buffer is kept until the next one
is copied out, in backward it is freed at once; the next block's is there already; what a reduce-scatter reads is kept
until the next block's gradients are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_moe_ep.tools.plan.activations import Event, Trace
from lightning_moe_ep.tools.plan.memory import Gathered, Spread
from lightning_moe_ep.tools.plan.states import OptimizerStates


@dataclass(frozen=True)
class Moment:
    """What is alive on the device at a moment of a step, in bytes; optimizers have their state already."""

    where: str
    """Such as "backward of model.layers.3"."""

    kept: int
    """Parameters, buffers and optimizer state."""

    gradients: int = 0
    """Of this rank's parts, or of whole weights that are added up unreduced."""

    gathered: int = 0
    """Weights that FSDP2 has gathered, its buffers, and what it reduces."""

    activations: int = 0
    """What a forward has left for backward and what is being computed, with the inputs and the block's gradients."""

    @property
    def total(self) -> int:
        return self.kept + self.gradients + self.gathered + self.activations


@dataclass(frozen=True)
class StepOptions:
    """What the memory of a step depends on, beside the layout and the way that the trace was run."""

    reshard_after_forward: bool = True
    accumulate: int = 1
    """Micro-batches of a step."""

    reduce_every_micro_batch: bool = False


def peak(spread: Spread, states: OptimizerStates, trace: Trace, options: StepOptions = StepOptions()) -> Moment:
    """The moment of a step at which a rank needs most.

    Args:
        spread: the model in a layout.
        states: what its optimizers keep.
        trace: of the way that is planned, for the ep of the layout.
        options: of the run.
    """
    return max(moments(spread, states, trace, options), key=lambda moment: moment.total)


def moments(spread: Spread, states: OptimizerStates, trace: Trace, options: StepOptions) -> Iterator[Moment]:
    """Those moments of the step that may be the one."""
    unreduced = options.accumulate > 1 and not options.reduce_every_micro_batch
    if unreduced:
        yield from _Walk(spread, states, trace, options, unreduced=True).run()
    if not unreduced or options.accumulate > 1:
        yield from _Walk(spread, states, trace, options, unreduced=False).run()


@dataclass(frozen=True)
class _Unit:
    """A block, or all that belongs to the roots, with the modules in fp32 inside of it."""

    groups: list[Gathered]
    lone: int
    """Gradients of weights that FSDP2 does not manage."""

    @property
    def weights(self) -> int:
        return sum(group.weights for group in self.groups)

    @property
    def buffers(self) -> int:
        return sum(group.buffer for group in self.groups)

    @property
    def transposing(self) -> int:
        return max((group.transposing for group in self.groups), default=0)

    @property
    def last_buffer(self) -> int:
        return self.groups[-1].buffer if self.groups else 0

    @property
    def accumulated(self) -> int:
        return sum(group.accumulated for group in self.groups)


class _Walk:
    """One micro-batch, and the optimizer's step after it."""

    def __init__(
        self, spread: Spread, states: OptimizerStates, trace: Trace, options: StepOptions, *, unreduced: bool
    ) -> None:
        self._spread, self._trace, self._options, self._unreduced = spread, trace, options, unreduced
        keeps, away = spread.resident(states), spread.offloaded(states)
        self._all_gradients = keeps.gradients - away.gradients
        self._kept = keeps.total - keeps.gradients - (away.total - away.gradients)
        self._intermediate = 0 if spread.cpu_offload else self._intermediate_of(states)
        self._units = self._units_by_name()
        self._root = self._units.pop("")
        self._extra = 0
        """Activations that the blocks that were cut out of the trace have left."""
        self._retained = 0
        """Gathered weights that stay from forward to backward."""
        self._gradients = 0
        self._reducing = 0
        """What reduce-scatters have read, and is not freed yet."""
        self._all_reduced = 0
        """What replicas have summed, which is kept until the end of the backward if the gradients are of another
        dtype."""
        self._added_up = options.accumulate > 1 and options.reduce_every_micro_batch
        """Whether gradients are added to those of the micro-batch before."""

    def run(self) -> Iterator[Moment]:
        root = self._root
        if self._unreduced:
            self._gradients = sum(unit.accumulated + unit.lone for unit in (root, *self._units.values()))
        else:
            self._gradients = self._all_gradients  # of the step before: Lightning drops them before backward
        yield self._moment("gathering of the roots", gathered=root.weights + root.buffers + root.transposing)
        self._retained = root.weights
        before: dict[str, Event] = {}
        saved: dict[str, int] = {}
        left = 0  # the buffer of the last all-gather
        for event in self._trace.events:
            if event.moment == "before":
                assert event.unit is not None
                yield self._moment(f"before {event.unit}", gathered=left, activations=event.highest)
                before[event.unit] = event
            elif event.moment == "after":
                assert event.unit is not None
                saved[event.unit] = event.level - before[event.unit].level
                yield from self._forward(event.unit, before[event.unit], event, saved[event.unit])
                left = self._units[event.unit].last_buffer
            elif event.moment == "output":
                yield self._moment("after the blocks", gathered=left, activations=event.highest)
                left = 0
            elif event.moment == "turn":
                yield self._moment("the loss", gathered=left, activations=event.highest)
                if not self._unreduced and not self._added_up:
                    self._gradients = 0
            elif event.moment == "before backward":
                assert event.unit is not None
                yield self._moment(
                    f"the backward of the loss, before {event.unit}", gathered=self._reducing, activations=event.highest
                )
                before[event.unit] = event
            elif event.moment == "after backward":
                assert event.unit is not None
                yield from self._backward(event.unit, before[event.unit], event, saved[event.unit])
            else:
                yield self._moment("the end of the backward", gathered=self._reducing, activations=event.highest)
                self._retained -= root.weights
                unreduced = 0 if self._unreduced else sum(group.gradients for group in root.groups) + root.lone
                yield from self._reduce("the roots", root, 0, event.level - unreduced)
        yield Moment("the optimizer's step", kept=self._kept + self._intermediate, gradients=self._all_gradients)

    def _forward(self, name: str, start: Event, end: Event, saved: int) -> Iterator[Moment]:
        for number, copy in enumerate(self._trace.copies[name]):
            unit, offset = self._units[copy], number * saved
            yield self._moment(
                f"gathering of {copy}",
                gathered=unit.weights + unit.buffers + unit.transposing,
                activations=start.level + offset,
            )
            following = self._following(copy)
            yield self._moment(
                f"forward of {copy}",
                gathered=unit.weights + unit.last_buffer + (following.buffers if following else 0),
                activations=end.highest + offset,
            )
            if not self._options.reshard_after_forward:
                self._retained += unit.weights
        self._extra += (len(self._trace.copies[name]) - 1) * saved

    def _backward(self, name: str, start: Event, end: Event, saved: int) -> Iterator[Moment]:
        copies = self._trace.copies[name]
        for number in reversed(range(len(copies))):
            copy, unit = copies[number], self._units[copies[number]]
            freed = (len(copies) - 1 - number) * saved
            weights, prefetched = unit.weights, 0
            if self._options.reshard_after_forward:
                yield self._moment(
                    f"gathering of {copy} for backward",
                    gathered=unit.weights + unit.buffers + unit.transposing + self._reducing,
                    activations=start.level - freed,
                )
                preceding = self._preceding(copy)
                prefetched = preceding.buffers if preceding else 0
            else:
                self._retained -= unit.weights
            yield self._moment(
                f"backward of {copy}",
                gathered=weights + prefetched + self._reducing,
                activations=end.highest - freed,
            )
            yield from self._reduce(copy, unit, prefetched, end.level - end.gradients - freed)
        self._extra -= (len(copies) - 1) * saved

    def _reduce(self, name: str, unit: _Unit, prefetched: int, activations: int) -> Iterator[Moment]:
        """The reduction of a unit's gradients, once its backward has run.

        Args:
            name: of the unit.
            unit: what it gathers.
            prefetched: bytes of buffers of the unit that comes next.
            activations: without the unit's gradients.
        """
        weights = unit.weights
        # What is added up is there already, and what this micro-batch adds is gone once it is added.
        waiting = 0 if self._unreduced else sum(group.gradients for group in unit.groups) + unit.lone
        self._reducing = 0
        for group in reversed(unit.groups):
            weights -= group.weights
            self._reducing += group.reduced
            yield self._moment(
                f"reduction of {name}",
                gathered=weights + prefetched + self._reducing,
                activations=activations + waiting,
            )
            if self._unreduced:
                self._gradients -= group.accumulated
            else:
                waiting -= group.gradients
            written = group.shard + (group.kept if group.kept != group.shard else 0)
            yield self._moment(
                f"reduction of {name}",
                gathered=weights + prefetched + self._reducing + written,
                activations=activations + waiting,
            )
            if not self._spread.cpu_offload and not self._added_up:
                self._gradients += group.kept
            if self._spread.layout.replicate > 1 and group.kept != group.shard:
                self._all_reduced += group.shard
        if not self._unreduced and not self._added_up:
            self._gradients += unit.lone

    def _moment(self, where: str, *, gathered: int = 0, activations: int = 0) -> Moment:
        return Moment(
            where=where,
            kept=self._kept,
            gradients=self._gradients,
            gathered=gathered + self._retained + self._all_reduced,
            activations=activations + self._extra,
        )

    def _units_by_name(self) -> dict[str, _Unit]:
        """The blocks, each with what is in fp32 inside of it, and under "" all else."""
        spread, shapes = self._spread, self._spread.shapes
        blocks = [unit.name for unit in shapes.units if unit.role == "block"]
        groups: dict[str, list[Gathered]] = {name: [] for name in ("", *blocks)}
        lone = dict.fromkeys(groups, 0)

        def home(name: str) -> str:
            return next((block for block in blocks if f"{name}.".startswith(f"{block}.")), "")

        homes = {unit.name: home(unit.name) for unit in shapes.units}
        for unit in shapes.units:
            groups[homes[unit.name]] += spread.groups[unit.name]
        for parameter in shapes.parameters:
            if parameter.name not in spread.by_fsdp and parameter.trained:
                place = homes[parameter.unit] if parameter.unit is not None else ""
                lone[place] += math.prod(spread.parts[parameter.name].gathered) * parameter.dtype.itemsize
        return {name: _Unit(groups[name], lone[name]) for name in groups}

    def _following(self, name: str) -> _Unit | None:
        """What is gathered beside a block in its forward."""
        following = self._spread.shapes.unit(name).prefetches
        return self._units[following] if following is not None and self._spread.layout.fsdp > 1 else None

    def _preceding(self, name: str) -> _Unit | None:
        """What is gathered beside a block in its backward."""
        units = self._spread.shapes.units
        return next((self._units[unit.name] for unit in units if unit.prefetches == name), None)

    def _intermediate_of(self, states: OptimizerStates) -> int:
        """Bytes of intermediate results of the optimizer's step."""
        sizes = [
            self._spread.parts[parameter.name].padded * parameter.dtype.itemsize
            for parameter in self._spread.shapes.parameters
            if parameter.name in states.states
        ]
        return int(states.intermediate * (sum(sizes) if states.whole_model else max(sizes, default=0)))
