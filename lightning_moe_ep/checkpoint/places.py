"""Where the tensors of a model get their values from: each with its recipe, or the reasons why there is none.

All is told from the files' headers and from the model's names and shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_moe_ep.checkpoint.conversions import PlainRecipes
from lightning_moe_ep.checkpoint.names import converted_modules
from lightning_moe_ep.checkpoint.prefetch import Span
from lightning_moe_ep.checkpoint.recipes import Recipe
from lightning_moe_ep.checkpoint.safetensors_files import whole
from lightning_moe_ep.checkpoint.unconverted import unconverted
from lightning_moe_ep.experts import plain_class
from lightning_moe_ep.shards import of_part, part_of

_OUTDATED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Buffers that models once saved, and now compute."""


def plan_places(
    model: PreTrainedModel, made_of: Callable[[Mapping[str, torch.Size]], PlainRecipes], *, source: Path, strict: bool
) -> list[Place]:
    """Places for all tensors of the model that there are recipes for.

    Args:
        model: may be parallel.
        made_of: from the shapes of the plain model's tensors, by name, to their recipes.
        source: what is read, for messages.
        strict: as in `load_pretrained`.

    Raises:
        ValueError: names, shapes or dtypes do not match.
    """
    tensors = model.state_dict(keep_vars=True)
    plain_names = {name: plain for name in tensors if (plain := _without_adapters(name)) is not None}
    converted = converted_modules(model)
    owners = {f"{experts.prefix}{name}": experts for experts in converted for name in experts.parameters}
    shapes = {name: tensors[name].shape for name in plain_names if name not in owners}
    for experts in converted:
        shapes.update((f"{experts.prefix}{name}", shape) for name, shape in experts.file_shapes.items())
    in_files = {name: plain for name in shapes if (plain := _without_adapters(name)) is not None}
    shapes = {plain: shapes[name] for name, plain in in_files.items()}
    made = made_of(shapes)
    pieces = {name: made.recipes[plain] for name, plain in in_files.items() if plain in made.recipes}
    recipes = {name: recipe for name, recipe in pieces.items() if name not in owners}
    for name, experts in owners.items():
        if (recipe := unconverted(experts, name.removeprefix(experts.prefix), pieces)) is not None:
            recipes[name] = recipe

    places, missing = [], []
    modules = dict(model.named_modules())
    aliases: dict[int, list[str]] = {}
    for name in plain_names:
        aliases.setdefault(id(tensors[name]), []).append(name)
    for names in aliases.values():
        if (found := next((name for name in names if name in recipes), None)) is None:
            missing.append(names[0])
        else:
            slots = [_slot(modules, name) for name in names]
            places.append(Place(found, tensors[found], slots, recipes[found]))
    problems = _problems(model, made, shapes, missing, strict=strict)
    if problems := problems or [
        place.wrong_dtype for place in places if place.wrong_dtype and plain_names[place.name] not in made.dequantized
    ]:
        raise ValueError("\n  ".join([f"{source} does not fit {plain_class(model).__name__}:", *problems]))
    return places


def _without_adapters(name: str) -> str | None:
    """The name that a tensor has in the model before PEFT wrapped some of its modules; None for an adapter's own."""
    path = [part for part in name.split(".") if part != "base_layer"]
    return None if any(part.startswith("lora_") for part in path) else ".".join(path)


def _slot(modules: Mapping[str, nn.Module], name: str) -> tuple[dict[str, Any], str]:
    owner, _, key = name.rpartition(".")
    module = modules[owner]
    slots: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
    return slots, key


def _problems(
    model: PreTrainedModel,
    plain: PlainRecipes,
    shapes: Mapping[str, torch.Size],
    missing: Sequence[str],
    *,
    strict: bool,
) -> list[str]:
    """All that does not match, a line each."""
    problems = list(plain.errors)
    if strict:
        problems += [
            f"{what}: {name}"
            for what, names, ignored in (
                ("missing", missing, model._keys_to_ignore_on_load_missing),
                ("unexpected", plain.unexpected, {*(model._keys_to_ignore_on_load_unexpected or ()), *_OUTDATED}),
            )
            for name in names
            if not any(re.search(pattern, name) for pattern in ignored or ())
        ]
    for name, recipe in plain.recipes.items():
        if recipe.shape != shapes[name]:
            problems.append(
                f"mis-shaped: {name} is {list(recipe.shape)} in the files, {list(shapes[name])} in the model"
            )
    return problems


class Place:
    """A tensor of the model, under all the names that it has there, and the recipe that it is made by."""

    def __init__(self, name: str, tensor: Tensor, slots: Sequence[tuple[dict[str, Any], str]], recipe: Recipe) -> None:
        self.name, self.tensor, self.slots, self.recipe = name, tensor, slots, recipe
        self.region = part_of(tensor) if isinstance(tensor, DTensor) else whole(tensor.shape)
        self.target = tensor

    @property
    def wrong_dtype(self) -> str | None:
        """What is wrong with the dtype in the file, if anything."""
        for stored, _ in self.recipe.sources(whole(self.recipe.shape)):
            floats = stored.dtype.is_floating_point and stored.dtype.itemsize > 1
            if floats != self.tensor.is_floating_point() and stored.dtype != self.tensor.dtype:
                return f"{stored.file}: tensor {stored.name} is {stored.dtype}, but {self.name} is {self.tensor.dtype}"
        return None

    @property
    def bytes_in_file(self) -> int:
        """Of this rank's part: its share of what the tensor takes in the files."""
        size = sum(
            math.prod(part.stop - part.start for part in region) * stored.dtype.itemsize
            for stored, region in self.recipe.sources(whole(self.recipe.shape))
        )
        mine = math.prod(part.stop - part.start for part in self.region)
        if not size:  # from a Trainer's checkpoint
            return mine * self.tensor.dtype.itemsize
        return size * mine // max(1, math.prod(self.recipe.shape))

    def position(self) -> tuple[Path, int]:
        """Where the first of what is read is."""
        return next(((stored.file, stored.offset) for stored, _ in self.recipe.sources(self.region)), (Path(), 0))

    def make_room(self, device: torch.device) -> None:
        """Have a plain tensor for this rank's part: that of the model, or a new one on `device` if it has none yet."""
        local = self.tensor.detach()
        if isinstance(local, DTensor):
            local = local._local_tensor
        self.target = torch.empty_like(local, device=device) if local.is_meta else local

    def settle(self) -> None:
        """Put what was on the meta device into the model."""
        if not self.tensor.is_meta:
            return
        value: Tensor = self.target
        if isinstance(like := self.tensor, DTensor):
            value = of_part(value, like)
        if isinstance(self.tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=self.tensor.requires_grad)
        for slots, key in self.slots:
            slots[key] = value


def files_of(plan: Sequence[Place]) -> list[Path]:
    return sorted({stored.file for place in plan for stored, _ in place.recipe.sources(whole(place.recipe.shape))})


def needed_by(plan: Sequence[Place], rank: int) -> Iterator[Span]:
    """What a rank reads; any rank can tell of any other."""
    for place in plan:
        if isinstance(place.tensor, DTensor):
            coordinate = (place.tensor.device_mesh.mesh == rank).nonzero()[0].tolist()
            region = part_of(place.tensor, coordinate)
        elif rank == 0:
            region = place.region
        else:
            continue
        for stored, part in place.recipe.sources(region):
            for start, length in stored.runs(part):
                yield Span(stored.file, start, start + length)
