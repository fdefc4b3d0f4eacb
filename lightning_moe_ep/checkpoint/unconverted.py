"""Recipes for experts that are kept in memory otherwise than in the plain model: what is read of a file's pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lightning_moe_ep.checkpoint.names import Converted
from lightning_moe_ep.checkpoint.recipes import Computed, Recipe, read
from lightning_moe_ep.checkpoint.safetensors_files import OpenFiles, Region, StoredTensor, whole


def unconverted(experts: Converted, name: str, recipes: Mapping[str, Recipe]) -> Recipe | None:
    """A recipe for a parameter of an experts module whose adapter converts; None if the file lacks a piece of it.

    Args:
        experts: the module.
        name: of the parameter, within the module.
        recipes: of the plain model's tensors, by name.
    """
    needed = experts.goes_into[name]
    pieces = {piece: recipes[f"{experts.prefix}{piece}"] for piece in needed if f"{experts.prefix}{piece}" in recipes}
    if len(pieces) < len(needed):
        return None
    shape, dtype = experts.shapes[name], experts.parameters[name].dtype
    rows = _rows_in_pieces(experts, name)

    def part(piece: str, region: Region) -> Region | None:
        """What of a piece goes into these rows."""
        mine = [place for place, row in enumerate(rows[piece]) if region[0].start <= row < region[0].stop]
        if not mine:
            return None
        every = whole(experts.file_shapes[piece])
        return every if len(rows[piece]) == 1 else (slice(mine[0], mine[-1] + 1), *every[1:])

    def compute(region: Region, files: OpenFiles) -> Tensor:
        given: dict[str, Tensor] = {}
        for piece, piece_shape in experts.file_shapes.items():
            if piece not in pieces:  # it belongs to other parameters only
                given[piece] = torch.empty(piece_shape, device="meta")
                continue
            given[piece] = torch.zeros((), dtype=dtype).expand(piece_shape)  # it belongs to other ranks' rows only
            if (wanted := part(piece, region)) is not None:
                value = read(pieces[piece], wanted, files, dtype=dtype)
                if wanted != whole(piece_shape):
                    given[piece] = given[piece].contiguous()
                    given[piece][wanted] = value
                else:
                    given[piece] = value
        return experts.adapter.from_file(given)[name][region]

    def needs(region: Region) -> Iterator[tuple[StoredTensor, Region]]:
        for piece, recipe in pieces.items():
            if (wanted := part(piece, region)) is not None:
                yield from recipe.sources(wanted)

    return Computed(compute, needs, shape, mixed=range(1, len(shape)))


def _rows_in_pieces(experts: Converted, name: str) -> dict[str, list[int]]:
    """For each piece, which row of the parameter each of its rows is (-1: of none); one number if it is one row."""
    values = {}
    for other, shape in experts.shapes.items():
        rows = torch.arange(shape[0]) if other == name else torch.full((shape[0],), -1)
        values[other] = rows.float().view(-1, *[1] * (len(shape) - 1))  # one element stands for a row
    return {piece: value.flatten().int().tolist() for piece, value in experts.adapter.to_file(values).items()}
