"""Routing one forward as another was: recording which experts each token was given, and giving it them again.

    with record_routing(model) as routing:
        model(input_ids)
    with replay_routing(model, routing, weights="recorded"):
        model(input_ids)

A `Routing` holds plain tensors by the experts modules' names. It may be kept on the host, saved, used in another
process at any other layout, or come from the engine that generated the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_moe_ep.experts.find import ExpertsModule, find_experts
from lightning_moe_ep.experts.routers import find_routers
from lightning_moe_ep.experts.spread import spread_of
from lightning_moe_ep.experts.watching import replace_routing, watch_routing
from lightning_moe_ep.remember import is_remembering
from lightning_moe_ep.rows import is_recomputation

ReplayedWeights = Literal["recorded", "current"]
"""The weights of a forward that is routed as another: as they were there, or by the router as it is now."""


@dataclass(frozen=True)
class Routing:
    """Which experts the tokens of some forwards were given, and with which weights.

    `torch.save` and `torch.load` take it as it is.
    """

    index: dict[str, list[Tensor]]
    """By the name of the experts module in the model: for each forward, in their order, `[T, K]` ids of experts,
    integers of any type, on any device. T are the rank's own tokens of a forward in the order of the flattened
    `input_ids [B, S]`, padding included; an id outside `[0, E)` chooses no expert."""

    weights: dict[str, list[Tensor]] = field(default_factory=dict)
    """Likewise, `[T, K]`; nothing where they are not known."""

    @classmethod
    def from_layers(cls, model: nn.Module, index: Sequence[Tensor]) -> Routing:
        """From one tensor a forward for all layers, as engines give it that generate.

        Args:
            model: will be routed so.
            index: for each forward `[T, layers, K]` ids of experts, tensors or arrays of NumPy; layers are those with
                experts, or all of the model's, of which those without experts are not looked at.

        Raises:
            ValueError: a tensor has another shape.
        """
        names = [found.name for found in find_experts(model)]
        layers, places = _layers_around(model, names)
        orders = {layers: places, len(names): list(range(len(names)))}
        index = [torch.as_tensor(ids) for ids in index]
        for number, ids in enumerate(index):
            if ids.ndim != 3 or ids.shape[1] not in orders:
                raise ValueError(
                    f"the routing of forward {number} is {list(ids.shape)}, but has to be [T, layers, K] with"
                    f" {' or '.join(str(count) for count in sorted(orders))} layers: the model has {layers}, of which"
                    f" {len(names)} have experts"
                )
        return cls({name: [ids[:, orders[ids.shape[1]][at]] for ids in index] for at, name in enumerate(names)})

    def to(self, device: torch.device | str) -> Routing:
        """A copy on another device, such as "cpu"."""
        return Routing(*({n: [each.to(device) for each in of[n]] for n in of} for of in (self.index, self.weights)))


torch.serialization.add_safe_globals([Routing])  # so that torch.load takes it, which by default takes tensors only


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routing]:
    """Inside, note how the tokens of each forward on this rank are routed, those of evaluations included.

    What activation checkpointing recomputes is not noted again.

    Args:
        model: plain or parallel, or a LightningModule that holds it; names in the routing are those within `model`.

    Raises:
        ValueError: it has experts whose routing is no `[T, K]`: lists of experts, and others that are called with rows
            that the model sorted itself; names them.
    """
    routing = Routing({}, {})
    with ExitStack() as stack:
        for found in _routed(model):
            index, weights = (of.setdefault(found.name, []) for of in (routing.index, routing.weights))
            stack.callback(watch_routing(found, partial(_note, index, weights)).remove)
        yield routing


def _note(index: list[Tensor], weights: list[Tensor], top_k_index: Tensor, top_k_weights: Tensor) -> None:
    if not is_recomputation():
        index.append(top_k_index.detach().clone())
        weights.append(top_k_weights.detach().clone())


@contextmanager
def replay_routing(model: nn.Module, routing: Routing, *, weights: ReplayedWeights) -> Iterator[None]:
    """Inside, route the tokens of each forward as those of a recorded one were, the first as the first and so on.

    All ranks enter it together, and meet over the host once in each experts layer to tell whether the recording fits.
    Backward may run inside or after it.

    Args:
        model: plain or parallel, at any layout, or a LightningModule that holds it: what `routing` has the names of.
        routing: the forwards, on this rank's own tokens; there may be more than are run.
        weights: "recorded": those of the recording, so that experts give what they gave there, whatever has become of
            the router, which gets no gradient; what else it gives, such as Inkling's weights of shared experts, is that
            of today. "current": the router's own of today for the recorded experts, normalised as it does, with its
            gradients: what reinforcement learning wants, where the tokens were generated with a choice of experts that
            training has to repeat while the router goes on learning (R2, recorded by the trainer, or R3, by the engine
            that generates).

    Raises:
        ValueError: `weights` is not known, the routing is not that of this model, or a forward has other tokens than
            the recorded one, or is one more than were recorded, on any rank: every rank raises it. Or the experts of
            the model cannot be routed so; or, with "current", a layer's router chooses other experts than the recorded
            and not by one `topk`, or was compiled.
        RuntimeError: a checkpoint of the user's own recomputes what is replayed, and does not keep the routing.
    """
    if weights not in get_args(ReplayedWeights):
        raise ValueError(f"weights={weights!r} is not known; use one of {list(get_args(ReplayedWeights))}")
    experts = _routed(model)
    spread = spread_of(experts[0].module)
    group = spread.host_group if spread is not None else None
    if spread is None and (name := _checkpointed(model)) is not None:
        raise ValueError(
            f"{name} has gradient_checkpointing on in a plain model, which would route again when it is recomputed;"
            " parallelize the model (ep=1 on one device), or switch it off"
        )
    if weights == "current" and spread is not None and spread.compiled:
        raise ValueError(
            "weights='current' has routers choose recorded experts, which what compile_blocks compiled cannot; use"
            " compile_blocks=False, or weights='recorded'"
        )
    _raise_together(_misfit(experts, routing, weights), group)
    replays = [_Replay(found, routing, weights, group) for found in experts]
    with ExitStack() as stack:
        if weights == "current":
            choices = _Choices()
            routers = find_routers(model)
            for replay in replays:
                replay.choices = choices
                hook = torch.compiler.disable(partial(choices.begin, replay))
                stack.callback(routers[replay.name].register_forward_pre_hook(hook).remove)
            stack.enter_context(choices)
        for found, replay in zip(experts, replays, strict=True):
            stack.callback(replace_routing(found, replay).remove)
        yield


class _Replay:
    """The forwards of one experts module."""

    def __init__(
        self, found: ExpertsModule, routing: Routing, weights: ReplayedWeights, group: dist.ProcessGroup | None
    ) -> None:
        self.name, self.num_experts = found.name, found.num_experts
        self._is_plain = spread_of(found.module) is None
        self._index = routing.index[found.name]
        self._weights = routing.weights[found.name] if weights == "recorded" else None
        self._group = group
        self._done = 0
        self.choices: _Choices | None = None
        self.has_chosen = False
        """Whether the router was given the recorded experts in the forward that runs."""

    @property
    def recorded(self) -> Tensor | None:
        """`[T, K]` of the forward that runs."""
        return self._index[self._done] if self._done < len(self._index) else None

    def __call__(self, top_k_index: Tensor, top_k_weights: Tensor) -> tuple[Tensor, Tensor | None]:
        if is_recomputation() or (self._is_plain and is_remembering()):
            raise RuntimeError(
                f"the experts of {self.name} are recomputed by a checkpoint that does not keep the routing it replays;"
                " use MoEEPStrategy(activation_checkpointing=...), or with a parallel model"
                " checkpoint(..., context_fn=remember_routing)"
            )
        index = self.recorded
        _raise_together(self._misfit(index, top_k_index), self._group)
        assert index is not None
        weights = None if self._weights is None else self._weights[self._done]
        if self.choices is not None:
            self.choices.end()
        self.has_chosen = False
        self._done += 1
        index = index.to(top_k_index.device, torch.int64, non_blocking=True)
        if weights is None:
            return index, None
        return index, weights.to(top_k_weights.device, top_k_weights.dtype, non_blocking=True)

    def _misfit(self, index: Tensor | None, top_k_index: Tensor) -> str | None:
        """Why this forward cannot be routed as recorded."""
        if index is None:
            return f"forward {self._done} of {self.name} is to be replayed, but {self._done} were recorded"
        if index.shape != top_k_index.shape:
            return (
                f"in forward {self._done} of {self.name} [T, K] is {list(top_k_index.shape)}, but {list(index.shape)}"
                " was recorded"
            )
        # A choice that is no topk may be one that cannot change, such as by a table of token ids.
        if self.choices is None or self.has_chosen or torch.equal(index.to(top_k_index), top_k_index):
            return None
        return (
            f"the router of {self.name} chooses other experts than were recorded, and not by one topk over them, so"
            " that weights='current' cannot have it choose those; use weights='recorded'"
        )


class _Choices(TorchFunctionMode):
    """Has the `topk` of a router choose what was recorded, between the router's call and that of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self._replay: _Replay | None = None

    def begin(self, replay: _Replay, *_: Any) -> None:
        if not is_recomputation():  # which remembers its choices
            self._replay = replay

    def end(self) -> None:
        self._replay = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk) or self._replay is None:
            return func(*args, **kwargs)
        return self._choose(self._replay, func, *args, **kwargs)

    def _choose(self, replay: _Replay, func: Callable[..., Any], input: Tensor, k: int, *rest: Any, **more: Any) -> Any:
        index, (*rows, width) = replay.recorded, input.shape
        last = (rest[0] if rest else more.get("dim", -1)) in (-1, input.ndim - 1)
        # Not one over groups of experts, or over something else.
        fits = index is not None and last and width >= replay.num_experts and index.shape == (input.numel() // width, k)
        if index is None or not fits:
            return func(input, k, *rest, **more)
        replay.has_chosen = True
        chosen = index.to(input.device, torch.int64, non_blocking=True).clamp(0, width - 1).view(*rows, k)
        return torch.return_types.topk((input.gather(-1, chosen), chosen))


def _routed(model: nn.Module) -> list[ExpertsModule]:
    experts = find_experts(model)
    for found in experts:
        if not found.adapter.routes_tokens:
            raise ValueError(
                f"the experts of {found.name} ({type(found.module).__name__}) are called with rows that the model chose"
                " and sorted itself, so that there is no routing [T, K] to record or to replay"
            )
    return experts


def _misfit(experts: Sequence[ExpertsModule], routing: Routing, weights: ReplayedWeights) -> str | None:
    """Why a routing is none of these experts, or cannot be replayed so."""
    if not isinstance(routing, Routing):
        return f"the routing is a {type(routing).__name__}, but has to be a Routing"
    names = {found.name for found in experts}
    if names != routing.index.keys():
        missing, unknown = sorted(names - routing.index.keys()), sorted(routing.index.keys() - names)
        return (
            f"the routing is of {len(routing.index)} experts modules, but the model has {len(names)}"
            f" (only in the model: {missing}; only in the routing: {unknown}); record with the same module, or see"
            " Routing.from_layers"
        )
    for name in sorted(names):
        index, values = routing.index[name], routing.weights.get(name)
        if (wrong := next((each for each in index if not _has_ids(each)), None)) is not None:
            told = f"{list(wrong.shape)} of {wrong.dtype}" if isinstance(wrong, Tensor) else type(wrong).__name__
            return f"the index of {name} is {told}, but has to be a tensor [T, K] of integers"
        shapes = [value.shape for value in values or () if isinstance(value, Tensor)]
        if weights == "recorded" and shapes != [each.shape for each in index]:
            return (
                f"the routing has no weights for each index of {name}; use weights='current', which takes them from"
                " the router"
            )
    return None


def _has_ids(index: Any) -> bool:
    if not isinstance(index, Tensor) or index.ndim != 2 or index.dtype == torch.bool:
        return False
    return not index.is_floating_point() and not index.is_complex()


def _raise_together(misfit: str | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank where one has a misfit, so that none is left in a collective.

    Raises:
        ValueError: with what the ranks say.
    """
    told = {0: misfit}
    if group is not None and group.size() > 1:
        failed = torch.tensor([misfit is not None], dtype=torch.int32)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
        if not failed:
            return
        of_ranks: list[str | None] = [None] * group.size()
        dist.all_gather_object(of_ranks, misfit, group=group)
        told = dict(enumerate(of_ranks))
    misfits = {rank: each for rank, each in told.items() if each is not None}
    if len(misfits) == len(told) and len(set(misfits.values())) == 1:
        raise ValueError(misfits[0])
    if misfits:
        raise ValueError("; ".join(f"rank {rank}: {each}" for rank, each in misfits.items()))


def _checkpointed(model: nn.Module) -> str | None:
    return next(
        (type(m).__name__ for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True), None
    )


def _layers_around(model: nn.Module, names: Sequence[str]) -> tuple[int, list[int]]:
    """How many layers the list has in which experts modules are, and the place of each in it."""
    paths = [name.split(".") for name in names]
    depth = next((depth for depth, part in enumerate(paths[0]) if part.isdigit()), None)
    if depth is None or any(path[:depth] != paths[0][:depth] or not path[depth].isdigit() for path in paths):
        return len(names), list(range(len(names)))
    return len(list(model.get_submodule(".".join(paths[0][:depth])).children())), [int(path[depth]) for path in paths]
