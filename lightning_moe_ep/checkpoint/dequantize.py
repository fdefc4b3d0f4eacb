"""Weights that were quantised for the hub, dequantised by transformers' own operations as they are read.

Block by block: a rank reads and dequantises its own experts, and of a matrix the rows that are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Not exported by transformers; read at 5.24. A test fails when they move.
from transformers.core_model_loading import ConversionOps
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.quantizers.auto import AutoHfQuantizer

from lightning_moe_ep.checkpoint.recipes import Computed, InFile, Recipe, read
from lightning_moe_ep.checkpoint.safetensors_files import FileTensor, OpenFiles, Region, whole

METHODS = ("fp8", "mxfp4")
"""What can be dequantised: blocks of FP8 (or packed FP4), and MXFP4."""


def dequantizer(quantization: Mapping[str, Any] | None, folder: Path) -> Any:
    """What transformers dequantises the weights of a folder with; None if they are not quantised.

    Args:
        quantization: the `quantization_config` of the folder's configuration.
        folder: for the message.

    Raises:
        NotImplementedError: they are quantised in another way.
    """
    if not quantization:
        return None
    method = quantization.get("quant_method")
    if method not in METHODS:
        raise NotImplementedError(
            f"the weights in {folder} are quantised ({method}), and of that only {' and '.join(METHODS)} can be"
            " dequantised while they are read; use weights that are not quantised"
        )
    return AutoHfQuantizer.from_config({**quantization, "dequantize": True}, pre_quantized=True)


def is_dequantize(operation: ConversionOps) -> bool:
    return isinstance(operation, Fp8Dequantize | Mxfp4Dequantize)


def dequantized(
    operation: ConversionOps, state: Mapping[str, Sequence[Recipe]], target: str, targets: Sequence[str], model: Any
) -> dict[str, list[Recipe]]:
    """What the operation makes of weights and their scales.

    Args:
        operation: one of which `is_dequantize` is true, the first of its conversion.
        state: recipes by pattern of the names.
        target: the name of what the conversion makes.
        targets: its patterns.
        model: what the operation asks for dtypes.
    """

    def convert(parts: dict[str, list[Tensor]]) -> Tensor:
        (made,) = operation.convert(parts, model=model, full_layer_name=target).values()
        return (made[0] if isinstance(made, list) else made).detach()

    if isinstance(operation, Mxfp4Dequantize):
        return {targets[0]: [_made_of_parts({key: recipe for key, (recipe,) in state.items()}, convert, row=1)]}
    result: dict[str, list[Recipe]] = {}
    for key, recipes in state.items():
        if "activation_scale" in key or "weight_scale_inv" in key:
            continue
        scales = state.get(f"{key}_scale_inv")
        if scales is None:
            made = list(recipes)
        elif len(scales) != len(recipes):
            raise ValueError(f"there are {len(recipes)} of {key}, but {len(scales)} scales")
        else:
            made = [
                _made_of_parts(
                    {"weight": weight, "weight_scale_inv": scale},
                    convert,
                    row=weight.shape[0] // (*scale.shape, 1, 1)[0],
                )
                for weight, scale in zip(recipes, scales, strict=True)
            ]
        result[targets[0] if key == "weight" else key] = made
    return result


def _made_of_parts(
    parts: Mapping[str, Recipe], convert: Callable[[dict[str, list[Tensor]]], Tensor], row: int
) -> Computed:
    """A recipe that dequantises what of the parts belongs to some rows.

    Args:
        parts: the first has the rows of the result, the others one row for `row` of them.
        convert: from the same rows of each to the result.
    """
    first = next(iter(parts))
    on_meta = {key: [torch.empty(part.shape, dtype=_dtype(part), device="meta")] for key, part in parts.items()}

    def rows_of(region: Region) -> slice:
        start, stop = region[0].start // row * row, -(-region[0].stop // row) * row
        return slice(start, min(stop, parts[first].shape[0]))

    def pieces(region: Region) -> Iterator[tuple[str, Recipe, Region]]:
        rows = rows_of(region)
        for key, part in parts.items():
            of = 1 if key == first else row
            first_dim = [slice(rows.start // of, -(-rows.stop // of))] if part.shape else []  # a scale may be a number
            yield key, part, (*first_dim, *whole(part.shape)[1:])

    def compute(region: Region, files: OpenFiles) -> Tensor:
        parts_read = {key: [read(part, wanted, files, dtype=_dtype(part))] for key, part, wanted in pieces(region)}
        start = rows_of(region).start
        return convert(parts_read)[region[0].start - start : region[0].stop - start]

    def needs(region: Region) -> Iterator[tuple[FileTensor, Region]]:
        for _, part, wanted in pieces(region):
            yield from part.sources(wanted)

    shape = convert(on_meta).shape
    return Computed(compute, needs, shape, mixed=range(1, len(shape)))


def _dtype(recipe: Recipe) -> torch.dtype:
    assert isinstance(recipe, InFile)
    return recipe.tensor.dtype
