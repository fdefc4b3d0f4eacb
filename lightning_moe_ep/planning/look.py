"""What a forward of the model shows that its shapes do not: its arithmetic, its attentions, how it treats routings.

A model of transformers on the meta device is run once, without data and without its experts. Of other models nothing
is known of the inputs, and so they are not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_utils import AttentionInterface

from lightning_moe_ep.experts import find_experts
from lightning_moe_ep.planning.sequences import Attention
from lightning_moe_ep.planning.shapes import ModelShapes
from lightning_moe_ep.planning.wire import Routing
from lightning_moe_ep.transformers_models import outermost_models
from lightning_moe_ep.trees import map_tensors

MAX_LENGTH = 512
"""Tokens in the sequence that is run; attention's part grows with its square, and is scaled from there."""


@dataclass(frozen=True)
class Look:
    """What was seen."""

    flops: float
    """Floating-point operations of one token's forward, of a multiply-add two; experts and attention among them."""

    expert_flops: float
    """Those of the routed experts."""

    routing: Mapping[str, Routing] = field(default_factory=dict)
    """By the experts module's name."""

    attentions: tuple[Attention, ...] = ()
    """Those that go through transformers' attention interface, in the order of the forward."""

    assumed: str | None = None
    """Why the arithmetic is that of the parameters alone and routing is taken as usual, if it is."""


def look_at(model: nn.Module, shapes: ModelShapes, *, length: int | None) -> Look:
    """Run the model once, if it is one of transformers.

    Args:
        model: as `shapes_of` has left it, on the meta device; it is left as it was.
        shapes: of it.
        length: tokens of a sequence; None: not known, and attention is left out.
    """
    models = outermost_models(model)
    if len(models) != 1:
        return by_parameters(model, shapes, "it is no model of transformers, whose forward could be run without data")
    try:
        # Two lengths, for the products, which grow with the length, and attention, which grows with its square.
        (one, routing, attentions), (two, *_) = (
            _run(model, models[0][1], shapes, size) for size in (MAX_LENGTH // 2, MAX_LENGTH)
        )
    except Exception as error:  # remote code, or a model that needs more than token ids
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        return by_parameters(model, shapes, f"its forward cannot be run without data ({told})")
    per_length = (two - one) / (MAX_LENGTH - MAX_LENGTH // 2)
    of_dense = one - per_length * (MAX_LENGTH // 2)
    of_experts = _expert_flops(shapes)
    return Look(of_dense + per_length * (length or 0) + of_experts, of_experts, routing, attentions)


def by_parameters(model: nn.Module, shapes: ModelShapes, why: str) -> Look:
    """What the parameters alone say of the arithmetic: a product with each matrix, with those of K experts."""
    of_dense = 2.0 * sum(p.numel for p in shapes.parameters if p.experts is None and len(p.shape) > 1)
    of_dense -= 2.0 * sum(p.numel() for p in _looked_up(model))
    of_experts = _expert_flops(shapes)
    assumed = f"only products with its parameters are counted, no attention, and routing weights as wide as rows: {why}"
    return Look(of_dense + of_experts, of_experts, assumed=assumed)


def _expert_flops(shapes: ModelShapes) -> float:
    """Of a token's K experts in each layer."""
    total = 0.0
    for experts in shapes.experts:
        weights = sum(p.numel for p in shapes.parameters if p.experts == experts.name and len(p.shape) > 2)
        total += 2.0 * weights * (experts.top_k or 0) / experts.num_experts
    return total


def _looked_up(model: nn.Module) -> list[nn.Parameter]:
    """The tables of embeddings, which nothing is multiplied with, unless they are the head's too."""
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    others = {p for m in model.modules() if not isinstance(m, nn.Embedding) for p in m._parameters.values()}
    return [table for table in tables if table not in others]


def _run(
    whole: nn.Module, model: nn.Module, shapes: ModelShapes, length: int
) -> tuple[float, dict[str, Routing], tuple[Attention, ...]]:
    """Operations of one token's forward, but for the experts', and what is seen of the routing and the attentions."""
    kept = 0
    at_experts: dict[str, int] = {}
    after_block: dict[str, int] = {}
    weight_bytes: dict[str, int] = {}
    attentions: dict[str, Attention] = {}
    names = {module: name for name, module in whole.named_modules()}

    def seen(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> None:
        attentions[names[module]] = _attention(names[module], shapes, query, key, value)

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += 1
        return tensor

    def stand_in(name: str, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        weight_bytes[name] = weights.element_size()
        output: Tensor = _NoExperts.apply(hidden, weights)
        at_experts[name] = kept
        return output

    def block_ends(name: str, *_: Any) -> None:
        after_block[name] = kept

    with _as_before(whole), _as_computed(whole, shapes), _attending(seen):
        for found in find_experts(whole):
            found.adapter.install(partial(stand_in, found.name), alone=False)
        hooks = [
            whole.get_submodule(unit).register_forward_hook(partial(block_ends, unit))
            for unit in {experts.unit for experts in shapes.experts}
        ]
        try:
            ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
            # As a whole mask, so that none is made, for which transformers looks at the values of positions.
            mask = torch.zeros(1, 1, length, length, dtype=torch.bool, device="meta")
            counter = FlopCounterMode(display=False)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), counter:
                model(input_ids=ids, attention_mask=mask, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
    routing = {
        experts.name: Routing(weight_bytes[experts.name], after_block[experts.unit] > at_experts[experts.name])
        for experts in shapes.experts
        if experts.name in weight_bytes
    }
    return counter.get_total_flops() / length, routing, tuple(attentions.values())


def _attention(name: str, shapes: ModelShapes, query: Tensor, key: Tensor, value: Tensor) -> Attention:
    numbers = [number for number, p in enumerate(shapes.parameters) if p.name.startswith(f"{name}.")]
    until = max(numbers, default=-1) + 1
    return Attention(
        name=name,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        width=query.shape[3],
        value_width=value.shape[3],
        nbytes=query.element_size(),
        is_trained=any(p.trained for p in shapes.parameters[:until]),
    )


@contextmanager
def _attending(seen: Callable[[nn.Module, Tensor, Tensor, Tensor], None]) -> Iterator[None]:
    """Inside, `seen` is told of each attention through transformers' interface: its module, `[B, heads, S, D]` each."""
    original = AttentionInterface.get_interface

    def get_interface(interface: AttentionInterface, name: str, default: Any) -> Any:
        function = original(interface, name, default)

        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen(module, query, key, value)
            return function(module, query, key, value, *args, **kwargs)

        return attend

    AttentionInterface.get_interface = get_interface
    try:
        yield
    finally:
        AttentionInterface.get_interface = original


class _NoExperts(torch.autograd.Function):
    """In place of the experts: keeps nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor) -> Tensor:
        return hidden.new_empty(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


@contextmanager
def _as_computed(model: nn.Module, shapes: ModelShapes) -> Iterator[None]:
    """Inside, weights have the dtypes in which FSDP2 gathers them, and what goes into its modules in fp32 is cast."""
    gathered = {unit.name: unit.gathered for unit in shapes.units}
    kept = [(model.get_parameter(p.name), gathered.get(p.unit or "")) for p in shapes.parameters]
    before = [(parameter, parameter.data) for parameter, dtype in kept if dtype is not None]
    for parameter, dtype in kept:
        if dtype is not None:
            parameter.data = parameter.data.to(dtype)
    cast = partial(map_tensors, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)
    hooks = [
        model.get_submodule(unit.name).register_forward_pre_hook(
            lambda _, args, kwargs: (cast(args), cast(kwargs)), with_kwargs=True
        )
        for unit in shapes.units
        if unit.role == "fp32"
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, data in before:
            parameter.data = data


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Afterwards every module has the forward, and the mode, that it had."""
    before = [(module, vars(module).get("forward"), module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, forward, training in before:
            module.training = training
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward
