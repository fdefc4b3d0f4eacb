"""Where the plain model's tensors are in those of the parallel model, in plain types that a checkpoint keeps.

Experts that are stacked in memory may be apart in the plain model. With this record a checkpoint goes from the names of
the one to those of the other in any process, without the model's code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moe_ep.checkpoint.names import Converted, converted_modules
from lightning_moe_ep.checkpoint.stored import Stored

Pieces = Mapping[str, Any]
"""By the start of the names of a converted experts module's parameters: `parameters`, their shapes in memory; and
`pieces`, by the plain model's names the `shape` and the `rows` that each is made of (a parameter, the first row and the
one after the last). None if the way between the two moves more than rows."""


def describe_pieces(model: nn.Module) -> dict[str, Any]:
    """The pieces of all converted experts modules of a parallel model."""
    return {experts.prefix: _pieces(experts) for experts in converted_modules(model)}


def describe_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[list[list[str]]]:
    """The names of the parameters of each group of each optimizer; none at all if one has others than the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    described = [
        [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    return [] if any("" in of_group for groups in described for of_group in groups) else described


def _pieces(experts: Converted) -> dict[str, Any] | None:
    # One number for each row of each parameter shows which way the rows go.
    numbers: dict[str, Any] = {}
    owners: list[tuple[str, int]] = []
    for name, shape in experts.shapes.items():
        if not shape:
            return None
        numbers[name] = torch.arange(shape[0]) + len(owners)
        owners += [(name, row) for row in range(shape[0])]
    try:
        moved: dict[str, Tensor] = experts.adapter.to_file(dict(numbers))
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    found: dict[str, Any] = {}
    for piece, ids in moved.items():
        rows = [owners[int(number)] for number in ids.flatten()]
        shape = experts.file_shapes[piece]
        if shape[: ids.ndim] != ids.shape or any(experts.shapes[name][1:] != shape[ids.ndim :] for name, _ in rows):
            return None
        found[piece] = {"shape": list(shape), "rows": _runs(rows)}
    return {"parameters": {name: list(shape) for name, shape in experts.shapes.items()}, "pieces": found}


def _runs(rows: Iterable[tuple[str, int]]) -> list[list[Any]]:
    runs: list[list[Any]] = []
    for name, row in rows:
        if runs and runs[-1][0] == name and runs[-1][2] == row:
            runs[-1][2] = row + 1
        else:
            runs.append([name, row, row + 1])
    return runs


def to_plain(pieces: Pieces, weights: Mapping[str, Any]) -> dict[str, Any]:
    """From weights by the parallel model's names to those of the plain model; all else in a state dict stays."""
    result = dict(weights)
    for module in modules(pieces):
        mine = {name: result.pop(module.prefix + name) for name in module.parameters if module.prefix + name in result}
        if len(mine) == len(module.parameters):
            result.update({module.prefix + piece: module.piece_of(piece, mine) for piece in module.pieces})
    return result


def to_parallel(pieces: Pieces, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `to_plain`."""
    result = dict(weights)
    for module in modules(pieces):
        mine = {name: result.pop(module.prefix + name) for name in module.pieces if module.prefix + name in result}
        if len(mine) == len(module.pieces):
            result.update({module.prefix + name: module.parameter_of(name, mine) for name in module.parameters})
    return result


def sources_of_pieces(pieces: Pieces) -> dict[str, list[str]]:
    """By the names of the plain model's tensors that are elsewhere in the parallel model: what they are made of."""
    return {
        module.prefix + piece: [module.prefix + source for source in module.sources(piece)]
        for module in modules(pieces)
        for piece in module.pieces
    }


def modules(pieces: Pieces) -> Iterator[Module]:
    """
    Raises:
        NotImplementedError: one moves more than rows.
    """
    for prefix, described in pieces.items():
        if described is None:
            raise NotImplementedError(
                f"the weights of {prefix.removesuffix('.')} cannot be taken to the plain model's form, or back, without"
                " the model; resume a run from this checkpoint with the form of checkpoints that you need"
                " (MoEEPStrategy's save_distributed_checkpoint)"
            )
        yield Module(
            prefix, {name: torch.Size(shape) for name, shape in described["parameters"].items()}, described["pieces"]
        )


@dataclass(frozen=True)
class Module:
    """A converted experts module of a checkpoint."""

    prefix: str
    """Before the names of its parameters."""

    parameters: dict[str, torch.Size]
    """In memory, by their names in the module."""

    pieces: dict[str, Any]
    """What the plain model has."""

    def shape_of(self, piece: str) -> torch.Size:
        return torch.Size(self.pieces[piece]["shape"])

    def sources(self, piece: str) -> list[str]:
        """The parameters that a piece is made of."""
        return list(dict.fromkeys(name for name, _, _ in self.pieces[piece]["rows"]))

    def parts_of(self, parameter: str) -> list[str]:
        """The pieces that have rows of a parameter."""
        return [piece for piece in self.pieces if parameter in self.sources(piece)]

    def piece_of(self, piece: str, parameters: Mapping[str, Stored]) -> Stored:
        """A piece from what is there for its sources: parameters, or what an optimizer keeps in their shape."""
        rows = self.pieces[piece]["rows"]
        if self._is_row(piece):
            ((name, start, _),) = rows
            return parameters[name].row(start)
        return Stored.of_rows([(parameters[name], start, stop) for name, start, stop in rows])

    def parameter_of(self, parameter: str, pieces: Mapping[str, Stored]) -> Stored:
        """A parameter, or what an optimizer keeps in its shape, from what is there for its pieces."""
        found = []
        for piece in self.parts_of(parameter):
            stored = pieces[piece].as_row() if self._is_row(piece) else pieces[piece]
            row = 0
            for name, start, stop in self.pieces[piece]["rows"]:
                if name == parameter:
                    found.append((start, (stored, row, row + stop - start)))
                row += stop - start
        return Stored.of_rows([part for _, part in sorted(found, key=lambda entry: entry[0])])

    def _is_row(self, piece: str) -> bool:
        """Whether it is a row without the dimension that counts rows."""
        (name, *_), *_ = self.pieces[piece]["rows"]
        return len(self.shape_of(piece)) < len(self.parameters[name])
