"""The memory that a forward and a backward take beside the weights, seen by running them without data.

A plain model on the meta device goes in, cut to one block of each kind, its experts as one rank of an ep group has
them, its weights in the dtype in which they are computed. It runs with the real dispatchers, under uniform routing, and
torch's memory tracker looks on. A `Trace` comes out: the bytes at each moment at which a block begins or ends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any, Literal

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_moe_ep.activation_checkpointing import ActivationCheckpointing, wrap_forwards
from lightning_moe_ep.causal_lm import summed_loss
from lightning_moe_ep.context_parallel import shard_sequences, slice_length, spread_attention
from lightning_moe_ep.dispatch import CombineDtype, ExpertGroup
from lightning_moe_ep.experts import Computation, ExpertsModule, choice_biases, find_experts
from lightning_moe_ep.fake_tensors import no_data
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.mesh import Meshes, build_meshes
from lightning_moe_ep.planning.shapes import kind_of
from lightning_moe_ep.precision import FSDP2Precision
from lightning_moe_ep.tools.plan.apart import run_apart
from lightning_moe_ep.tools.plan.kernels import kernels, unpadded
from lightning_moe_ep.tools.plan.tracking import Tracker, without_data
from lightning_moe_ep.tools.plan.uniform import UNIFORM, uniform_here
from lightning_moe_ep.trees import map_tensors, tensors_of
from lightning_moe_ep.units import Units, find_units, top_level_modules

Moment = Literal["before", "after", "output", "turn", "before backward", "after backward", "end"]
"""Of a block: before and after its forward and its backward. Of the model: its output, the loss, the end."""

Step = Callable[[nn.Module, int], Tensor]
"""From the model, or the LightningModule, to the loss of a batch without data; makes the batch, too, or its slice for a
rank of so many."""


@dataclass(frozen=True)
class Event:
    """A moment in a step."""

    moment: Moment
    unit: str | None
    """The block; None: the model."""

    level: int
    """Bytes of activations, inputs and gradients that are alive, beside weights and buffers."""

    highest: int
    """The most that were alive at the same time since the event before."""

    gradients: int = 0
    """Of these, after a block's backward: its weights' gradients, which FSDP2 reduces and frees next."""


@dataclass(frozen=True)
class Trace:
    """What a forward and backward of a model take, with one block of each kind."""

    events: tuple[Event, ...]
    copies: Mapping[str, tuple[str, ...]]
    """By the name of each block that ran: those of its list that are like it, itself first."""


@dataclass(frozen=True)
class Way:
    """What the memory of a forward and backward depends on."""

    ep: int
    dispatcher: str
    """One of "all_gather", "all_to_all" and "overlapped"; of no meaning at ep=1."""

    activation_checkpointing: ActivationCheckpointing = "none"
    computation: Computation = "auto"
    combine_dtype: CombineDtype = "auto"
    device_type: str = "cuda"
    """Where it is to run; other than on "cpu", attention is one kernel that keeps no scores."""

    cp: int = 1
    """Ranks that hold slices of the same sequences."""


@dataclass(frozen=True)
class CausalLM:
    """The step of `CausalLMModule`, and of transformers' language models: the loss of each next token."""

    sequences: int
    """Of a micro-batch on one rank, or of the cp ranks that hold slices of them."""

    tokens: int
    """Of each sequence."""

    def tokens_of(self, layout: Layout) -> int:
        """Of a rank in a micro-batch."""
        return self.sequences * slice_length(self.tokens, layout.cp)

    def __call__(self, module: nn.Module, cp: int) -> Tensor:
        model: Any = module.model if isinstance(module, L.LightningModule) else module
        ids = torch.zeros(self.sequences, self.tokens, dtype=torch.int64)
        batch = {"input_ids": ids} if cp == 1 else shard_sequences({"input_ids": ids}, rank=0, size=cp)
        output = model(**batch, use_cache=False)
        total, _ = summed_loss(output.logits, batch["input_ids"])
        aux_loss = getattr(output, "aux_loss", None)
        return total if aux_loss is None else total + aux_loss


def trace(
    build: Callable[[], nn.Module],
    step: Step,
    ways: Sequence[Way],
    *,
    precision: str = "32-true",
    fp32_modules: Sequence[str] = (),
) -> list[Trace]:
    """Run a step in each of these ways, in a process of its own.

    Args:
        build: makes the plain model on the meta device; see `exact.resident_exactly`.
        step: runs it; sent to the other process, too.
        ways: how.
        precision: the Trainer's.
        fp32_modules: as given to the strategy.

    Raises:
        ApartError: the model, or the step, cannot be run without data: it looks at values.
        ValueError: a way has a dispatcher whose needs are not known.
    """
    for way in ways:
        if way.ep > 1 and way.dispatcher not in UNIFORM:
            raise ValueError(
                f"what dispatcher={way.dispatcher!r} keeps for backward is not known; plan with one of {list(UNIFORM)}"
            )
    world = lcm(*(size for way in ways for size in (way.ep, way.cp)))
    return run_apart(world, 0, traces, build, step, list(ways), precision, list(fp32_modules))


def traces(
    build: Callable[[], nn.Module], step: Step, ways: Sequence[Way], precision: str, fp32_modules: Sequence[str]
) -> list[Trace]:
    """The same, in a process that has no other use, as rank 0 of a fake process group."""
    groups = {ep: dist.new_group(list(range(ep))) for ep in sorted({way.ep for way in ways})}
    layouts = [Layout.for_world(dist.get_world_size(), ep=1, cp=cp) for cp in sorted({way.cp for way in ways} - {1})]
    meshes = {layout.cp: build_meshes(layout, "cpu") for layout in layouts}
    plugin = FSDP2Precision(precision)
    plugin.fp32_modules = fp32_modules
    model = build()
    plugin.convert_module(model)
    experts = find_experts(model)
    for found in experts:
        found.adapter.prepare()
    names = {module: name for name, module in model.named_modules()}
    kept = _cut(model, _units_of(model, experts, fp32_modules, plugin.policy))
    copies = [tuple(names[like] for like in alike) for alike in kept.values()]
    # What is left is small, and each way has its own.
    return [
        _trace(copy.deepcopy(model), copies, step, way, groups[way.ep], meshes.get(way.cp), plugin.policy, fp32_modules)
        for way in ways
    ]


def _units_of(
    model: nn.Module, experts: Sequence[ExpertsModule], fp32_modules: Sequence[str], policy: MixedPrecisionPolicy
) -> Units:
    roots = top_level_modules(model) if isinstance(model, L.LightningModule) else None
    return find_units(model, experts, roots=roots, fp32_modules=fp32_modules, policy=policy)


def _trace(
    model: nn.Module,
    copies: Sequence[tuple[str, ...]],
    step: Step,
    way: Way,
    group: dist.ProcessGroup,
    meshes: Meshes | None,
    policy: MixedPrecisionPolicy,
    fp32_modules: Sequence[str],
) -> Trace:
    experts = find_experts(model)
    units = _units_of(model, experts, fp32_modules, policy)
    kept = units.blocks
    names = {block: alike[0] for block, alike in zip(kept, copies, strict=True)}
    counts = {found: found.num_experts for found in experts}
    _as_computed(model, units, experts, way.ep, policy)
    if meshes is not None:
        spread_attention(model, meshes, mode="ulysses")
    with no_data():
        without_data(model)
        for found, num_experts in counts.items():
            _install(found, num_experts, way, group)
        wrap_forwards(kept, activation_checkpointing=way.activation_checkpointing, compiles=False)
        _cast(units, kept, policy)
        with kernels(fused_attention=way.device_type != "cpu"), unpadded():
            events = _watch(model, units.roots, kept, names, lambda model: step(model, way.cp))
    return Trace(events=tuple(events), copies={alike[0]: alike for alike in copies})


def _cut(model: nn.Module, units: Units) -> dict[nn.Module, list[nn.Module]]:
    """Leave one block of each kind in every list; returns, for those that are left, which are like it."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    kept: dict[nn.Module, list[nn.Module]] = {}
    for sequence in units.sequences:
        first: dict[str, nn.Module] = {}
        for block in sequence:
            holder = next((each for each in lists if any(member is block for member in each)), None)
            like = first.setdefault(kind_of(block), block)
            if like is block or holder is None:
                kept[block] = [block]
            else:
                kept[like].append(block)
                del holder[next(place for place, member in enumerate(holder) if member is block)]
    return kept


def _as_computed(
    model: nn.Module, units: Units, experts: Sequence[ExpertsModule], ep: int, policy: MixedPrecisionPolicy
) -> None:
    """Have weights in the dtype in which they are gathered, and experts as many as a rank has."""
    biases = choice_biases(model)
    for bias in biases:
        bias.keep_fp32(torch.device("cpu"))
    own = {id(bias.tensor) for bias in biases}
    in_fp32 = {id(parameter) for module in units.in_fp32 for parameter in module.parameters()}
    inside = {id(parameter) for root in units.roots for parameter in root.parameters()}
    for parameter in model.parameters():
        if id(parameter) in in_fp32:
            parameter.data = parameter.data.float()
        elif policy.param_dtype and parameter.is_floating_point() and id(parameter) in inside - own:
            parameter.data = parameter.data.to(policy.param_dtype)
    for found in experts:
        for name in found.adapter.parameters:
            weight = found.module.get_parameter(name)
            weight.data = weight.data.chunk(ep)[0]


def _install(found: ExpertsModule, num_experts: int, way: Way, group: dist.ProcessGroup) -> None:
    compute = partial(found.adapter.compute, computation=way.computation)
    if way.ep == 1:
        here = partial(uniform_here, experts=compute, num_experts=num_experts)
        found.adapter.install(here, alone=False)
        return
    expert_group = ExpertGroup(
        group=group,
        host_group=group,
        num_experts=num_experts,
        combine_dtype=way.combine_dtype,
        equal_tokens=True,
    )
    found.adapter.install(partial(UNIFORM[way.dispatcher](expert_group), experts=compute), alone=False)


def _cast(units: Units, kept: Iterable[nn.Module], policy: MixedPrecisionPolicy) -> None:
    """Cast what FSDP2 casts: what goes into its modules, and what comes out of the roots and of those in fp32."""

    def to(dtype: torch.dtype) -> Callable[[Any], Any]:
        return partial(map_tensors, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def casts(module: nn.Module, dtype: torch.dtype) -> None:
        cast = to(dtype)
        module.register_forward_pre_hook(lambda _, args, kwargs: (cast(args), cast(kwargs)), with_kwargs=True)

    for module in units.in_fp32:
        casts(module, torch.float32)
    if policy.param_dtype is not None:
        for module in dict.fromkeys((*kept, *units.roots)):
            casts(module, policy.param_dtype)
    if policy.output_dtype is not None:
        cast = to(policy.output_dtype)
        for root in units.roots:
            root.register_forward_hook(lambda _, __, output: cast(output))


def _watch(
    model: nn.Module,
    roots: Sequence[nn.Module],
    blocks: Sequence[nn.Module],
    names: Mapping[nn.Module, str],
    step: Callable[[nn.Module], Tensor],
) -> list[Event]:
    tracker, events = Tracker(), list[Event]()
    tracker.track_external(model)
    weights = tracker.level

    def note(moment: Moment, unit: str | None = None, gradients: int = 0) -> None:
        highest = tracker.highest() - weights
        events.append(Event(moment, unit, tracker.level - weights, highest, gradients))

    def after_backward(block: nn.Module, *_: Any) -> None:
        before = tracker.level
        highest = tracker.highest() - weights
        for parameter in block.parameters():
            parameter.grad = None
        events.append(Event("after backward", names[block], before - weights, highest, before - tracker.level))

    def before_forward(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        note("before", names[block])
        return _as_between_others(block, args, kwargs)

    for block in blocks:
        block.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True)
        block.register_forward_hook(lambda block, *_: note("after", names[block]))
        block.register_full_backward_pre_hook(lambda block, _: note("before backward", names[block]))
        block.register_full_backward_hook(after_backward)
    for root in roots:
        if root not in blocks:
            root.register_forward_hook(lambda *_: note("output"), prepend=True)
    model.train()
    with tracker:
        loss = step(model)
        note("turn")
        loss.backward()
        note("end")
    return events


def _as_between_others(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Let a trained block's input require a gradient: it stands for those that have such blocks before them.

    Only in the first block may it not, where the embedding is frozen.
    """
    tensors = [t for t in tensors_of((args, kwargs)) if t.is_floating_point()]
    trained = any(parameter.requires_grad for parameter in block.parameters())
    if not tensors or not trained or any(tensor.requires_grad for tensor in tensors):
        return args, kwargs
    first = tensors[0]
    given = first.detach().requires_grad_()
    return map_tensors(lambda tensor: given if tensor is first else tensor, (args, kwargs))
