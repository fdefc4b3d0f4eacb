"""From the tensors of a Hugging Face folder to those of a model: by transformers' own mapping of names and conversions.

A model and what its folder holds go in; a recipe for each tensor that the plain model has, by its name, comes out. The
operations that move rows, columns or experts about are followed part by part; what else transformers does, it does
itself, on whole tensors. It is the one place that imports transformers' private functions for loading.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

# Not exported by transformers; read at 5.24. A test fails when they move.
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Split,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from lightning_moe_ep.checkpoint.dequantize import dequantized, is_dequantize
from lightning_moe_ep.checkpoint.recipes import (
    Computed,
    Concatenated,
    InFile,
    Narrowed,
    Recipe,
    Stacked,
    Transposed,
    read,
)
from lightning_moe_ep.checkpoint.safetensors_files import FileTensor, OpenFiles, Region, whole
from lightning_moe_ep.experts import plain_class

State = dict[str, list[Recipe]]
"""What an operation takes and gives: recipes by pattern of the names."""


@dataclass
class PlainRecipes:
    """How the tensors of a plain model are made."""

    recipes: dict[str, Recipe] = field(default_factory=dict)
    """By name in the plain model."""

    unexpected: list[str] = field(default_factory=list)
    """Tensors of the folder that the model has no use for."""

    dequantized: set[str] = field(default_factory=set)
    """The names among them of what is not in the files' dtype."""

    errors: list[str] = field(default_factory=list)
    """Tensors that cannot be converted, and why."""


def plain_recipes(
    model: PreTrainedModel,
    stored: Mapping[str, FileTensor],
    shapes: Mapping[str, torch.Size],
    quantizer: Any = None,
) -> PlainRecipes:
    """Recipes for the tensors of the plain model.

    Args:
        model: may be parallel.
        stored: what the folder has.
        shapes: of the plain model's tensors, by name.
        quantizer: what `dequantizer` gave for the folder.
    """
    with plain_classes(model):
        mapping = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    known: dict[str, Any] = dict(shapes)
    result = PlainRecipes()
    groups: dict[str, dict[str, list[FileTensor]]] = {}
    converted_by: dict[str, WeightConverter] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in shapes and name in shapes:
            target, pattern = name, None
        if target not in shapes:
            result.unexpected.append(name)
        elif pattern is None:
            result.recipes.setdefault(target, InFile(stored[name]))
        else:
            converted_by.setdefault(target, by_pattern[pattern])
            groups.setdefault(target, {}).setdefault(pattern, []).append(stored[name])
    plain_model = _ShapesOnly(model, shapes)
    for target, sources in groups.items():
        try:
            made = _Conversion(converted_by[target], target, sources, plain_model).recipes()
        except Exception as error:  # whatever transformers' operations raise on what they were not made for
            names = sorted(tensor.name for tensors in sources.values() for tensor in tensors)
            result.errors.append(f"{target} cannot be made of {', '.join(names[:4])}...: {error}")
            continue
        result.recipes.update(made)
        if any(is_dequantize(operation) for operation in converted_by[target].operations):
            result.dequantized.update(name for name, recipe in made.items() if not isinstance(recipe, InFile))
    return result


@contextmanager
def plain_classes(model: nn.Module) -> Iterator[None]:
    """Inside, modules have the classes that they had before FSDP2: transformers looks up conversions by class."""
    renamed = {module: type(module) for module in model.modules() if isinstance(module, FSDPModule)}
    for module in renamed:
        module.__class__ = plain_class(module)
    try:
        yield
    finally:
        for module, kind in renamed.items():
            module.__class__ = kind


class _ShapesOnly:
    """Stands for the model in transformers' operations, which ask for the shapes of its parameters: whole ones."""

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> None:
        self.config = model.config
        self._model, self._shapes = model, shapes

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@dataclass
class _Conversion:
    """One conversion of transformers, for one layer."""

    converter: WeightConverter
    target: str
    """The name of what is made; the first name, where several tensors are."""

    sources: Mapping[str, Sequence[FileTensor]]
    """By the pattern of their names."""

    model: Any

    def recipes(self) -> dict[str, Recipe]:
        state: State | None = {pattern: [InFile(t) for t in tensors] for pattern, tensors in self.sources.items()}
        for operation in self.converter.operations:
            assert state is not None
            if is_dequantize(operation):
                targets = self.converter.target_patterns
                state = dequantized(operation, state, self.target, targets, self.model)
                continue
            if (follow := FOLLOWED.get(type(operation))) is None:
                return self._by_transformers()
            if (state := follow(self, operation, state)) is None:
                return self._by_transformers()
        assert state is not None
        return {self._full_name(pattern): recipe for pattern, (recipe,) in state.items()}

    def _full_name(self, pattern: str) -> str:
        """From a target's pattern to its name, as the converter itself would have it."""
        first = next((p for p in self.converter.target_patterns if p in self.target), None)
        return self.target if first is None else self.target.replace(first, pattern, 1)

    # Operations that are followed part by part.

    def _stack(self, operation: MergeModulelist, state: State) -> State | None:
        if operation.dim != 0:
            return None
        targets = self.converter.target_patterns
        return {
            operation.get_target_pattern(len(state), pattern, targets): [Stacked(recipes)]
            for pattern, recipes in state.items()
        }

    def _concatenate(self, operation: Concatenate, state: State) -> State:
        members = [recipe for pattern in self.converter.source_patterns for recipe in state.get(pattern, [])]
        target = operation.get_target_pattern(self.converter.target_patterns)
        return {target: [Concatenated(members, operation.dim)]}

    def _chunk(self, operation: Chunk, state: State) -> State:
        ((recipe, *_),) = state.values()
        targets = operation.get_target_patterns(self.converter.target_patterns, config=self.model.config)
        size = -(-recipe.shape[operation.dim] // len(targets))
        return self._narrow(recipe, operation.dim, targets, [size] * len(targets))

    def _split(self, operation: Split, state: State) -> State:
        ((recipe, *_),) = state.values()
        targets = self.converter.target_patterns
        sizes = [self.model.get_parameter(self._full_name(target)).shape[operation.dim] for target in targets]
        return self._narrow(recipe, operation.dim, targets, sizes)

    def _narrow(self, recipe: Recipe, dim: int, targets: Sequence[str], sizes: Sequence[int]) -> State:
        state: State = {}
        start, end = 0, recipe.shape[dim]
        for target, size in zip(targets, sizes, strict=True):
            state[target] = [Narrowed(recipe, dim, start, min(size, end - start))]
            start += size
        return state

    def _transpose(self, operation: Transpose, state: State) -> State:
        ((recipe, *_),) = state.values()
        patterns = dict.fromkeys(state, recipe)
        target = operation.get_target_pattern(patterns, self.converter.source_patterns, self.converter.target_patterns)
        if operation.check_dims and recipe.shape == self.model.get_parameter(self.target).shape:
            return {target: [recipe]}
        return {target: [Transposed(recipe, operation.dim0, operation.dim1)]}

    def _interleave(self, operation: Interleave, state: State) -> State:
        ((recipe, *_),) = state.values()

        def compute(region: Region, files: OpenFiles) -> Tensor:
            part = read(recipe, region, files, dtype=next(recipe.sources(region))[0].dtype)
            (made,) = operation.convert({"": part}, [""], [""]).values()
            return made

        target = self.converter.target_patterns[0]
        return {target: [Computed(compute, recipe.sources, recipe.shape, mixed=[operation.dim])]}

    # What else there is, on whole tensors.

    def _by_transformers(self) -> dict[str, Recipe]:
        def run(tensors: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
            converter = copy.deepcopy(self.converter)
            converter.collected_tensors.update(tensors)
            made = converter.convert(self.target, model=self.model, config=self.model.config)
            return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

        def compute(name: str, _: Region, files: OpenFiles) -> Tensor:
            tensors = {p: [t.read(whole(t.shape), files) for t in of] for p, of in self.sources.items()}
            return run(tensors)[name]

        def needs(_: Region) -> Iterator[tuple[FileTensor, Region]]:
            for tensors in self.sources.values():
                for tensor in tensors:
                    yield tensor, whole(tensor.shape)

        on_meta = {
            pattern: [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]
            for pattern, tensors in self.sources.items()
        }
        return {name: Computed(partial(compute, name), needs, value.shape) for name, value in run(on_meta).items()}


FOLLOWED: dict[type[ConversionOps], Callable[[_Conversion, Any, State], State | None]] = {
    MergeModulelist: _Conversion._stack,
    Concatenate: _Conversion._concatenate,
    Chunk: _Conversion._chunk,
    Split: _Conversion._split,
    Transpose: _Conversion._transpose,
    Interleave: _Conversion._interleave,
}
