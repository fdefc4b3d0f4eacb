"""From one form of a Trainer's checkpoint to the other, in one process: a folder into a file that resumes, and back.

Tensors go through memory a few rows at a time; all else is written as it is.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from typing_extensions import override

from lightning_moe_ep.checkpoint.durable import saving_place, seal, sync
from lightning_moe_ep.checkpoint.export import MAX_MEMORY, check_free_place, check_space, new_folder, size_in_bytes
from lightning_moe_ep.checkpoint.layout_on_disk import data_offset, load_without_data, save_without_data
from lightning_moe_ep.checkpoint.pieces import Module, Pieces, modules, to_parallel, to_plain
from lightning_moe_ep.checkpoint.record import NEVER_STEPPED
from lightning_moe_ep.checkpoint.safetensors_writer import write_at
from lightning_moe_ep.checkpoint.stored import CURRENT, META, Stored, open_checkpoint
from lightning_moe_ep.trees import leaves_of, map_leaves, tensors_of


def convert_to_file(checkpoint: str | Path, path: str | Path, *, max_memory: str = MAX_MEMORY) -> Path:
    """Write a checkpoint in the folder form as one file, as the strategy does with save_distributed_checkpoint=False.

    Args:
        checkpoint: the folder.
        path: the file; it must not be there.
        max_memory: how much of the tensors may be in memory at a time, at least one row.

    Returns:
        The file.

    Raises:
        FileExistsError: the file is there.
        ValueError: it is no checkpoint in the folder form.
        NotImplementedError: the weights cannot be taken to the plain model's form without the model.
        OSError: there is too little space.
    """
    opened, target = open_checkpoint(Path(checkpoint)), Path(path).absolute()
    if not opened.is_folder:
        raise ValueError(f"{checkpoint} is one file already")
    check_free_place(target)
    if target.is_dir():
        raise FileExistsError(f"{target} is a folder; give the name of a file")
    names = [[group["params"] for group in optimizer["param_groups"]] for optimizer in opened.optimizers]
    whole = {**opened.rest, "state_dict": to_plain(opened.pieces, opened.weights)}
    if opened.current:
        whole[CURRENT] = to_plain(opened.pieces, opened.current)
    if opened.optimizers:
        whole["optimizer_states"] = [optimizer_to_file(opened.pieces, state) for state in opened.optimizers]
    if opened.record:
        whole["moe_ep"] = {**opened.record, "optimizers": names or opened.record.get("optimizers", [])}
    _write_file(whole, target, max_bytes=size_in_bytes(max_memory))
    return target


def convert_to_folder(checkpoint: str | Path, path: str | Path, *, max_memory: str = MAX_MEMORY) -> Path:
    """Write a checkpoint in the file form as a folder, as the strategy does by default.

    Args:
        checkpoint: the file, of our strategy.
        path: the folder; it must be empty, or not there.
        max_memory: how much of the tensors may be in memory at a time, at least one row.

    Returns:
        The folder.

    Raises:
        FileExistsError: the folder is not empty.
        ValueError: it is no checkpoint in the file form, or does not say which parameters its optimizers had.
        NotImplementedError: the weights cannot be taken to the parallel model's form without the model.
        OSError: there is too little space.
    """
    opened, target = open_checkpoint(Path(checkpoint)), Path(path).absolute()
    if opened.is_folder:
        raise ValueError(f"{checkpoint} is a folder already")
    check_free_place(target)
    names = opened.record.get("optimizers", [])
    if len(names) < len(opened.optimizers):
        raise ValueError(
            f"{checkpoint} does not say which parameters its optimizers have, as MoEEPStrategy notes it; resume a run"
            " from it with save_distributed_checkpoint=True, which saves a folder"
        )
    sharded: dict[str, Any] = {"state_dict": to_parallel(opened.pieces, opened.weights)}
    if opened.current:
        sharded[CURRENT] = to_parallel(opened.pieces, opened.current)
    for number, (state, of_groups) in enumerate(zip(opened.optimizers, names, strict=False)):
        sharded[f"optimizer_{number}"] = made = optimizer_to_folder(opened.pieces, state, of_groups)
        for name in opened.record.get(NEVER_STEPPED, {}).get(number, ()):
            made["state"].pop(name, None)  # beside experts that were stepped a file has zeros for it
    nbytes = sum(leaf.nbytes for leaf in leaves_of(sharded) if isinstance(leaf, Stored))
    with new_folder(target, nbytes=nbytes) as saving, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(
                _small_in_memory(sharded),
                # No copies ahead of the writing: see the planner.
                storage_writer=FileSystemWriter(saving, single_file_per_rank=True, per_thread_copy_ahead=0),
                planner=_RowsPlanner(size_in_bytes(max_memory) // 2),
                no_dist=True,
            )
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
        torch.save(opened.rest, saving / META)
        seal(saving)
    return target


# Optimizer state; `checkpoint.names` does the same with a model and whole tensors.


def optimizer_to_file(pieces: Pieces, saved: Mapping[str, Any]) -> dict[str, Any]:
    """From an optimizer's state by the names of the parallel model to the numbers that the plain model has.

    Raises:
        NotImplementedError: the optimizer keeps something that cannot be divided among experts.
    """
    state: dict[int, Any] = {}
    groups = []
    number = 0
    for group in saved["param_groups"]:
        first, known = number, dict(zip(group["params"], group.get("param_names", ()), strict=False))
        names = []
        for module, inner in _places(pieces, group["params"]):
            if module is None:
                of_piece = {inner[0]: saved["state"].get(inner[0])}
                names += [known.get(inner[0])]
            else:
                states = {name: saved["state"].get(module.prefix + name, {}) for name in inner}
                mine = [piece for piece in module.pieces if set(module.sources(piece)) & set(inner)]
                of_piece = {
                    piece: _gathered(states, module.sources(piece), module.parameters, partial(module.piece_of, piece))
                    for piece in mine
                }
                before = known.get(module.prefix + inner[0], "").removesuffix(inner[0])
                names += [before + piece for piece in mine]
            state.update({number + n: kept for n, kept in enumerate(of_piece.values()) if kept})
            number += len(of_piece)
        named = {"param_names": names} if known else {}
        groups.append({**group, "params": list(range(first, number)), **named})
    return {"state": state, "param_groups": groups}


def optimizer_to_folder(pieces: Pieces, saved: Mapping[str, Any], of_groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The inverse of `optimizer_to_file`.

    Args:
        pieces: of the model.
        saved: the state with numbers.
        of_groups: the names of the parallel model's parameters in each group.

    Raises:
        ValueError: the groups have other numbers of parameters.
        NotImplementedError: the optimizer keeps something that cannot be put together of the experts'.
    """
    state: dict[str, Any] = {}
    groups = []
    for group, names in zip(saved["param_groups"], of_groups, strict=True):
        numbers = iter(group["params"])
        places = _places(pieces, names)
        mine = [
            [p for p in module.pieces if set(module.sources(p)) & set(inner)] if module else inner
            for module, inner in places
        ]
        if sum(map(len, mine)) != len(group["params"]):
            raise ValueError(
                f"a group has {len(group['params'])} parameters, but its names are of {sum(map(len, mine))}"
            )
        for (module, inner), of_place in zip(places, mine, strict=True):
            states = {piece: saved["state"].get(next(numbers), {}) for piece in of_place}
            if module is None:
                made = states
            else:
                shapes = {piece: module.shape_of(piece) for piece in module.pieces}
                made = {
                    module.prefix + name: _gathered(
                        states, module.parts_of(name), shapes, partial(module.parameter_of, name)
                    )
                    for name in inner
                }
            state.update({name: kept for name, kept in made.items() if kept})
        groups.append({**group, "params": list(names)})
    return {"state": state, "param_groups": groups}


def _places(pieces: Pieces, names: Sequence[str]) -> list[tuple[Module | None, list[str]]]:
    """A group's parameters, in order, those of a converted module together, by their names in it."""
    known = list(modules(pieces))
    places: list[tuple[Module | None, list[str]]] = []
    of_modules: dict[str, list[str]] = {}
    for name in names:
        module = next(
            (m for m in known if name.startswith(m.prefix) and name.removeprefix(m.prefix) in m.parameters), None
        )
        if module is None:
            places.append((None, [name]))
        elif module.prefix in of_modules:
            of_modules[module.prefix].append(name.removeprefix(module.prefix))
        else:
            of_modules[module.prefix] = [name.removeprefix(module.prefix)]
            places.append((module, of_modules[module.prefix]))
    return places


def _gathered(
    states: Mapping[str, Mapping[str, Any]],
    sources: Sequence[str],
    shapes: Mapping[str, torch.Size],
    put_together: Callable[[Mapping[str, Stored]], Stored],
) -> dict[str, Any]:
    """What an optimizer keeps of a tensor, from what it keeps of those that the tensor is made of."""
    made: dict[str, Any] = {}
    for key in dict.fromkeys(key for name in sources for key in states.get(name, {})):
        values = {name: states[name][key] for name in sources if key in states.get(name, {})}
        example = next(iter(values.values()))
        if key != "step" and all(isinstance(v, Stored) and v.shape == shapes[n] for n, v in values.items()):
            # What was never stepped has zeros.
            made[key] = put_together(
                {name: values.get(name) or Stored.zeros(shapes[name], example.dtype) for name in sources}
            )
            continue
        if any(isinstance(value, Stored) and value.nbytes != value.dtype.itemsize for value in values.values()):
            raise NotImplementedError(
                f"the optimizer keeps a {key} of shape {list(example.shape)} for a parameter of shape"
                f" {list(shapes[next(iter(values))])}, which cannot be divided among experts"
            )
        # Adam's step count is one for all experts in memory: the largest of theirs.
        made[key] = max(values.values(), key=lambda value: float(value.whole() if isinstance(value, Stored) else value))
    return made


# Files.


def _write_file(tree: dict[str, Any], path: Path, *, max_bytes: int) -> None:
    """Write what `torch.save` would, with a `Stored` in place of each tensor."""
    tree = map_leaves(lambda leaf: Stored.of(leaf.detach().cpu()) if isinstance(leaf, Tensor) else leaf, tree)
    tensors = [leaf for leaf in leaves_of(tree) if isinstance(leaf, Stored)]
    path.parent.mkdir(parents=True, exist_ok=True)
    check_space(path.parent, sum(stored.nbytes for stored in tensors))
    saving = saving_place(path)
    try:
        save_without_data(tree, saving, is_tensor=lambda leaf: isinstance(leaf, Stored))
        with torch.serialization.safe_globals([type(Path())]):
            written = tensors_of(load_without_data(saving))
        for stored, place in zip(tensors, written, strict=True):
            row = stored.nbytes // max(1, stored.num_rows)
            for start, stop in stored.spans(max_bytes):
                write_at(saving, data_offset(place) + start * row, stored.read(start, stop))
        sync(saving)
        os.replace(saving, path)
        sync(path.parent)
    except BaseException:
        saving.unlink(missing_ok=True)
        raise


def _small_in_memory(tree: dict[str, Any]) -> dict[str, Any]:
    return map_leaves(lambda leaf: leaf.whole() if isinstance(leaf, Stored) and not leaf.shape else leaf, tree)


class _RowsPlanner(DefaultSavePlanner):
    """Has DCP write each `Stored` of a state dict in pieces of some rows, which are read as they are written."""

    state_dict: dict[str, Any]

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._stored: dict[str, Stored] = {}
        self._written = torch.empty(0)

    @override
    def create_local_plan(self) -> SavePlan:
        self._stored = {name: leaf for name, leaf in self.state_dict.items() if isinstance(leaf, Stored)}
        self.state_dict = {name: leaf for name, leaf in self.state_dict.items() if name not in self._stored}
        plan = super().create_local_plan()
        items = [item for name, stored in self._stored.items() for item in self._items(name, stored)]
        self.plan = replace(plan, items=[*plan.items, *items])
        return self.plan

    def _items(self, name: str, stored: Stored) -> Iterator[WriteItem]:
        rest = stored.shape[1:]
        for start, stop in stored.spans(self._max_bytes):
            offsets = torch.Size([start, *(0 for _ in rest)])
            yield WriteItem(
                MetadataIndex(name, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(offsets, torch.Size([stop - start, *rest])),
                    TensorProperties(dtype=stored.dtype),
                    stored.shape,
                ),
            )

    @override
    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn not in self._stored:
            return super().resolve_data(write_item)
        assert write_item.tensor_data is not None
        # torch 2.13 keeps the last piece of each tensor until the file is complete.
        self._written.untyped_storage().resize_(0)
        start, count = write_item.tensor_data.chunk.offsets[0], write_item.tensor_data.chunk.sizes[0]
        self._written = self._stored[write_item.index.fqn].read(start, start + count)
        return self._written
