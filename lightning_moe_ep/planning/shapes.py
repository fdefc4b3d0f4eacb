"""What a model's shapes say of a run before there is one: its parameters, what FSDP2 makes of them, its experts.

A plain model on the meta device goes in. It is asked what `parallelize` and the precision ask, by the same functions,
so that a plan and the run cannot part. What comes out are plain facts that know no layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_moe_ep.experts import (
    ExpertsModule,
    check_not_quantized,
    choice_biases,
    find_experts,
    find_routers,
)
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.precision import FSDP2Precision
from lightning_moe_ep.units import find_units, shard_dim, stay_whole, top_level_modules

Role = Literal["fp32", "block", "root"]

_TOP_K = ("top_k", "num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "num_selected_experts", "topk")
"""What models call K."""


@dataclass(frozen=True)
class ParameterShape:
    """A parameter, once, however many names it has."""

    name: str
    """Its first path in the model."""

    shape: tuple[int, ...]
    """Of the whole parameter, as it is in memory: experts of a list are stacked, adapters `[E, r, in]`."""

    dtype: torch.dtype
    """As it is kept, trained and checkpointed; `dtype.itemsize` bytes each."""

    trained: bool
    """Whether it requires a gradient; if not, it has neither gradient nor optimizer state, but is sharded all the
    same."""

    experts: str | None
    """The experts module that it is a part of with the expert dimension (dimension 0 is `E`, or `E * n`); None: dense,
    which the router, a shared expert, and what all experts of a module share are too."""

    unit: str | None
    """The name of the unit that FSDP2 shards it in; None: every rank holds it whole, and its gradient is averaged over
    the world if it has one (a parameter of the LightningModule itself, a bias that routers choose by)."""

    tied_to: tuple[str, ...] = ()
    """Its other paths."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class UnitShape:
    """A module that FSDP2 gathers and frees by itself.

    Within it the dense parameters are one group, with a collective of its own, and at ep > 1 the experts another.
    """

    name: str
    """Its path."""

    role: Role
    """"block": follows `reshard_after_forward`. "fp32": too, gathered in fp32. "root": stays gathered from its forward
    to its backward."""

    kind: str
    """Equal for units whose classes, parameters and buffers are alike, so that one of them stands for all."""

    gathered: torch.dtype | None
    """In which dtype it is gathered and computes; None: as its parameters are kept."""

    reduced: torch.dtype | None
    """In which dtype its gradients are reduced; None: that in which it computes."""

    prefetches: str | None
    """The unit that is gathered beside it in forward, if FSDP2 has more than one rank; in backward it is always the
    one before it."""


@dataclass(frozen=True)
class ExpertsShape:
    """An experts module."""

    name: str
    """Its path."""

    unit: str
    """The unit around it."""

    num_experts: int
    """E."""

    top_k: int | None
    """K, as the router or the model's config says; None: neither does."""

    hidden_size: int | None
    """H, of the rows that are sent, by the router's weight `[E, H]`; None: it has none."""

    dtype: torch.dtype
    """Of the rows that are sent."""

    equal_tokens: bool
    """Whether it dispatches equally many tokens on ranks whose inputs have equally many."""


@dataclass(frozen=True)
class ModelShapes:
    """What is known of a model without a layout."""

    parameters: tuple[ParameterShape, ...]
    buffers: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    """Name, shape and dtype; every rank holds all of them whole."""

    units: tuple[UnitShape, ...]
    """In the order in which FSDP2 takes what belongs to them: inner ones first, blocks in their order, roots last."""

    experts: tuple[ExpertsShape, ...]
    """In the order of the model's modules, which is that of its forward."""

    precision: str
    """One of `precision.SUPPORTED`."""

    def of_unit(self, name: str | None) -> Iterator[ParameterShape]:
        """The parameters of a unit; None: those of none."""
        return iter(self._by_unit.get(name, ()))

    @cached_property
    def _by_unit(self) -> dict[str | None, list[ParameterShape]]:
        found: dict[str | None, list[ParameterShape]] = {}
        for parameter in self.parameters:
            found.setdefault(parameter.unit, []).append(parameter)
        return found

    def unit(self, name: str) -> UnitShape:
        return next(unit for unit in self.units if unit.name == name)

    def by_fsdp(self, parameter: ParameterShape, layout: Layout, *, cpu_offload: bool = False) -> bool:
        """Whether FSDP2 manages a parameter in this layout.

        It does not manage what every rank holds whole, and experts that no other rank has and that need no cast.
        """
        if parameter.unit is None:
            return False
        if parameter.experts is None or cpu_offload:
            return True
        dtypes = self._dtypes_of_experts[parameter.experts]
        return not stay_whole(dtypes, layout, FSDP2Precision(self.precision).policy)

    @cached_property
    def _dtypes_of_experts(self) -> dict[str | None, set[torch.dtype]]:
        dtypes: dict[str | None, set[torch.dtype]] = {}
        for parameter in self.parameters:
            dtypes.setdefault(parameter.experts, set()).add(parameter.dtype)
        return dtypes

    def check_layout(self, layout: Layout) -> None:
        """
        Raises:
            ValueError: ep does not divide the experts of some module.
        """
        layout.check_experts({experts.name: experts.num_experts for experts in self.experts})


@dataclass(frozen=True)
class Part:
    """What one rank holds of a parameter."""

    gathered: tuple[int, ...]
    """The shape on a rank whose unit is gathered: the experts' slice of ep, else the whole."""

    dim: int
    """The dimension that FSDP2 shards."""

    ranks: int
    """Over how many ranks FSDP2 shards it; 1 if it does not."""

    @property
    def padded(self) -> int:
        """Elements that each rank allocates, and sends in an all-gather; the same on every rank."""
        return self.elements(0)

    def elements(self, coordinate: int) -> int:
        """Elements that are the parameter's own on the rank at `coordinate` of those that shard it; may be 0."""
        size = self.gathered[self.dim] if self.gathered else 1
        chunk = -(-size // self.ranks)
        own = max(0, min(chunk, size - coordinate * chunk))
        return math.prod(self.gathered) // size * own if size else 0


def part_of(parameter: ParameterShape, shapes: ModelShapes, layout: Layout, *, cpu_offload: bool = False) -> Part:
    """How a parameter is cut in a layout: by ep if it is of experts, then by FSDP2 as `torch.chunk` would."""
    shape = parameter.shape
    if parameter.experts is not None:
        shape = (shape[0] // layout.ep, *shape[1:])
    if not shapes.by_fsdp(parameter, layout, cpu_offload=cpu_offload):
        return Part(gathered=shape, dim=0, ranks=1)
    if parameter.experts is None or layout.ep == 1:
        return Part(gathered=shape, dim=0, ranks=layout.fsdp)
    return Part(gathered=shape, dim=shard_dim(shape, layout.efsdp), ranks=layout.efsdp)


def shapes_of(
    model: nn.Module,
    *,
    precision: str = "32-true",
    fp32_modules: Sequence[str] = (),
    roots: Sequence[nn.Module] | None = None,
) -> ModelShapes:
    """Ask a plain model what it is.

    Args:
        model: a LightningModule whose model is built, or a model, best on the meta device. It is converted to the
            precision, and its experts prepared as `parallelize` does; build another one to train.
        precision: the Trainer's.
        fp32_modules: as given to the strategy.
        roots: the modules that are called from outside; None: the children of a LightningModule, else `model` itself.

    Raises:
        NoExpertsError: the model has no experts module.
        NotImplementedError: experts that cannot be spread.
        ValueError: a precision or a name that there is not, or a parameter shared between units.
    """
    if roots is None and isinstance(model, L.LightningModule):
        roots = top_level_modules(model)
    plugin = FSDP2Precision(precision)
    plugin.fp32_modules = fp32_modules
    plugin.convert_module(model)
    check_not_quantized(model)
    experts = find_experts(model)
    for found in experts:
        found.adapter.prepare()
    policy = plugin.policy
    units = find_units(model, experts, roots=roots, fp32_modules=fp32_modules, policy=policy)
    biases = choice_biases(model)
    for bias in biases:
        bias.keep_fp32(torch.device("cpu"))
    for module in units.in_fp32:
        for parameter in module.parameters():
            parameter.data = parameter.data.float()

    paths: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        paths.setdefault(module, name)
    whole = {id(bias.tensor) for bias in biases}
    owner: dict[int, str] = {}
    unit_of_module: dict[nn.Module, str] = {}
    for unit, _ in units.in_order:
        for module in unit.modules():
            unit_of_module.setdefault(module, paths[unit])
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in whole:
                    owner.setdefault(id(parameter), paths[unit])
    following = {
        first: paths[second]
        for sequence in units.sequences
        for first, second in pairwise(block for block in sequence if block not in units.roots)
    }
    blocks = units.blocks
    return ModelShapes(
        parameters=tuple(_parameters(model, experts, owner)),
        buffers=tuple((name, tuple(buffer.shape), buffer.dtype) for name, buffer in model.named_buffers()),
        units=tuple(
            UnitShape(
                name=paths[module],
                role="block" if module in blocks and role != "fp32" else role,
                kind=kind_of(module),
                gathered=torch.float32 if role == "fp32" else policy.param_dtype,
                reduced=torch.float32 if role == "fp32" else policy.reduce_dtype,
                prefetches=following.get(module),
            )
            for module, role in units.in_order
        ),
        experts=tuple(_experts(model, experts, unit_of_module, policy.param_dtype)),
        precision=precision,
    )


def _parameters(model: nn.Module, experts: Sequence[ExpertsModule], owner: dict[int, str]) -> Iterator[ParameterShape]:
    of_experts = {
        id(found.module.get_parameter(name)): found.name for found in experts for name in found.adapter.parameters
    }
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    for key, parameter in tensors.items():
        first, *others = names[key]
        yield ParameterShape(
            name=first,
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            trained=parameter.requires_grad,
            experts=of_experts.get(key),
            unit=owner.get(key),
            tied_to=tuple(others),
        )


def _experts(
    model: nn.Module,
    experts: Sequence[ExpertsModule],
    unit_of_module: dict[nn.Module, str],
    gathered: torch.dtype | None,
) -> Iterator[ExpertsShape]:
    try:
        routers = find_routers(model)
    except ValueError:
        routers = {}
    for found in experts:
        weights = [found.module.get_parameter(name) for name in found.adapter.parameters]
        yield ExpertsShape(
            name=found.name,
            unit=unit_of_module[found.module],
            num_experts=found.num_experts,
            top_k=_top_k(model, found.name, routers.get(found.name)),
            hidden_size=_width_of(routers.get(found.name), found.num_experts),
            dtype=gathered or weights[0].dtype,
            equal_tokens=found.adapter.equal_tokens,
        )


def _top_k(model: nn.Module, name: str, router: nn.Module | None) -> int | None:
    """K by the router, else by the modules around the experts and their configs, the nearest first."""
    path = name.split(".")
    around = [model.get_submodule(".".join(path[:length])) for length in range(len(path), -1, -1)]
    for module in (*([router] if router is not None else []), *around):
        for holder in (module, getattr(module, "config", None)):
            for key in _TOP_K:
                if type(value := getattr(holder, key, None)) is int:
                    return value
    return None


def _width_of(router: nn.Module | None, num_experts: int) -> int | None:
    shapes: list[Tensor] = [] if router is None else list(router.parameters())
    return next((w.shape[1] for w in shapes if w.ndim == 2 and w.shape[0] == num_experts), None)


def kind_of(module: nn.Module) -> str:
    """Equal for modules of the same classes with the same parameters and buffers: what one takes, the others do."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    classes = sorted({type(part).__qualname__ for part in module.modules()})
    return repr(
        (type(module).__qualname__, classes, [(n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in tensors])
    )
