"""A Trainer's checkpoint of either form, opened in one process without reading its tensors.

What comes out has the structure of Lightning's checkpoint, with a `Stored` in place of each tensor, which reads as many
of its rows as one asks for. It is the one place that knows how torch's distributed checkpoint (DCP) lays out a file.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_moe_ep.checkpoint.layout_on_disk import data_offset, load_without_data

META = "meta.pt"
"""Lightning's name for what is not sharded."""


CURRENT = "current_model_state"
"""Under which a checkpoint whose `state_dict` has averages has the weights that are trained, as Lightning's
`WeightAveraging` names it."""


class NotACheckpointError(ValueError):
    """The path is no Trainer's checkpoint."""


class DamagedError(ValueError):
    """A checkpoint lacks files, or parts of them."""


@dataclass(frozen=True)
class Stored:
    """A tensor that is somewhere else, and read by its rows (those of the first dimension)."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[int, int], Tensor] = field(repr=False)
    """From the first row and the one after the last to a tensor of them in memory of its own; without a first
    dimension all is one row."""

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self) -> Tensor:
        return self.read(0, self.num_rows)

    def spans(self, max_bytes: int) -> Iterator[tuple[int, int]]:
        """The rows in pieces of at most so many bytes, but at least one row."""
        step = max(1, max_bytes // max(1, self.nbytes // max(1, self.num_rows)))
        for start in range(0, self.num_rows, step):
            yield start, min(start + step, self.num_rows)

    @classmethod
    def of(cls, tensor: Tensor) -> Stored:
        """A tensor that is in memory already, or mapped."""
        return cls(tensor.shape, tensor.dtype, lambda start, stop: _rows(tensor, start, stop).clone())

    @classmethod
    def zeros(cls, shape: torch.Size, dtype: torch.dtype) -> Stored:
        """A tensor that is nowhere."""
        return cls(shape, dtype, lambda start, stop: torch.zeros((stop - start, *shape[1:])[: len(shape)], dtype=dtype))

    @classmethod
    def of_rows(cls, parts: Sequence[tuple[Stored, int, int]]) -> Stored:
        """Rows of others, put together in order.

        Args:
            parts: where they come from: from which row to which.
        """
        ends = list(accumulate(stop - start for _, start, stop in parts))
        first = parts[0][0]

        def read(start: int, stop: int) -> Tensor:
            found = [torch.empty(0, *first.shape[1:], dtype=first.dtype)]
            number = bisect_right(ends, start)
            while start < stop:
                part, _, end = parts[number]
                offset = end - ends[number] + start
                count = min(stop - start, end - offset)
                found.append(part.read(offset, offset + count))
                start, number = start + count, number + 1
            return torch.cat(found) if len(found) != 2 else found[1]

        return cls(torch.Size([ends[-1], *first.shape[1:]]), first.dtype, read)

    def row(self, number: int) -> Stored:
        """A row as a tensor of its own."""
        return Stored(
            self.shape[1:], self.dtype, lambda start, stop: _rows(self.read(number, number + 1)[0], start, stop)
        )

    def as_row(self) -> Stored:
        """The inverse: the only row of a tensor with one dimension more."""
        return Stored(torch.Size([1, *self.shape]), self.dtype, lambda start, stop: self.whole()[None][start:stop])


def _rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[start:stop] if tensor.ndim else tensor


@dataclass(frozen=True)
class StoredCheckpoint:
    """What a Trainer saved."""

    path: Path

    is_folder: bool

    weights: dict[str, Any]
    """The state dict: a `Stored`, or what is no tensor. In a folder it has the names of the parallel model, in a file
    those of the plain model."""

    optimizers: list[dict[str, Any]]
    """`state` and `param_groups` of each; a folder has names of parameters where a file has numbers."""

    rest: dict[str, Any]
    """All other keys."""

    current: dict[str, Any]
    """The weights that are trained, if `weights` are averages; else `{}`."""

    @property
    def record(self) -> dict[str, Any]:
        """What our strategy notes of the model and the layout; `{}` if another one saved."""
        return self.rest.get("moe_ep", {})

    @property
    def pieces(self) -> dict[str, Any]:
        """Where the plain model's tensors are in those of the parallel model, if it has them elsewhere."""
        return self.record.get("pieces", {})

    @property
    def tensors(self) -> dict[str, Stored]:
        """Those of the weights."""
        return {name: value for name, value in self.weights.items() if isinstance(value, Stored)}


def open_checkpoint(path: Path, *, weights_only: bool | None = True) -> StoredCheckpoint:
    """Open a checkpoint of either form.

    Args:
        path: the folder or the file.
        weights_only: as in `torch.load`, for all but the tensors.

    Raises:
        FileNotFoundError: there is nothing.
        NotACheckpointError: it is something else.
        DamagedError: files are missing or too short.
        ValueError: `weights_only`, but there is more than plain values.
    """
    if not path.exists():
        raise FileNotFoundError(f"the checkpoint {path} does not exist")
    # What hyperparameters often hold.
    with torch.serialization.safe_globals([type(Path())]):
        try:
            return _open_folder(path, weights_only) if path.is_dir() else _open_file(path, weights_only)
        except pickle.UnpicklingError as error:
            reason = re.search(r"GLOBAL ([\w.]+)", str(error))
            raise ValueError(
                f"{path} holds more than plain values: {reason[1] if reason else error}; if you trust it, admit that in"
                " Python with torch.serialization.add_safe_globals, and do there what the command does"
            ) from None


def _open_file(path: Path, weights_only: bool | None) -> StoredCheckpoint:
    try:
        checkpoint = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    except (RuntimeError, EOFError, OSError) as error:
        with path.open("rb") as file:
            if file.read(2) == b"PK":  # a zip file begins so
                raise DamagedError(f"{path} is cut off or damaged: {str(error).splitlines()[0]}") from None
        raise NotACheckpointError(f"{path} is not a file that torch.save wrote: {str(error).splitlines()[0]}") from None
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        keys = list(checkpoint)[:5] if isinstance(checkpoint, dict) else type(checkpoint).__name__
        raise NotACheckpointError(f"{path} is not a Trainer's checkpoint: it has no state_dict, but {keys}")
    checkpoint = dict(checkpoint)
    weights = _stored(dict(checkpoint.pop("state_dict")))
    optimizers = [_stored(state) for state in checkpoint.pop("optimizer_states", [])]
    current = _stored(dict(checkpoint.pop(CURRENT, {})))
    return StoredCheckpoint(path, False, weights, optimizers, checkpoint, current)


def _stored(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return Stored.of(tree.detach())
    if isinstance(tree, dict):
        return {key: _stored(value) for key, value in tree.items()}
    return [_stored(value) for value in tree] if isinstance(tree, list) else tree


# The folder form.


@dataclass(frozen=True)
class Item:
    """Where DCP put one piece of a tensor, or an object: a file that torch.save wrote, within a larger one."""

    file: Path
    offset: int
    """Bytes, of the inner file."""
    length: int
    """Bytes, of the inner file."""

    def load(self) -> Any:
        with self.file.open("rb") as file, self._damage_is_told():
            file.seek(self.offset)
            return torch.load(io.BytesIO(file.read(self.length)), map_location="cpu", weights_only=True)

    @contextmanager
    def _damage_is_told(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0]
            raise DamagedError(f"{self.file} is damaged at byte {self.offset:,}: {reason}") from None

    def read_into(self, target: Tensor, start: int) -> None:
        """Read rows of the piece, from `start` on, without reading the others.

        Args:
            target: what is filled; its first dimension counts rows.
            start: the first row.
        """
        if not target.numel():
            return
        with self.file.open("rb") as file:
            with self._damage_is_told():
                layout = load_without_data(_Part(file, self.offset, self.length))
            if not layout.is_contiguous():
                target.copy_(_rows(self.load(), start, start + len(target) if target.ndim else 1))
                return
            rows = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
            row = math.prod(layout.shape[1:]) * layout.dtype.itemsize
            file.seek(self.offset + data_offset(layout) + start * row)
            if file.readinto(memoryview(rows.view(-1).view(torch.uint8).numpy())) != rows.nbytes:
                raise DamagedError(f"{self.file} is too short")
            if rows is not target:
                target.copy_(rows)


class _Part(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._offset + self._position)
        read = self._file.readinto(memoryview(buffer)[:count])
        self._position += read
        return read


def _open_folder(path: Path, weights_only: bool | None) -> StoredCheckpoint:
    if missing := [name for name in (META, ".metadata") if not (path / name).is_file()]:
        if len(missing) == 2 and not any(path.glob("*.distcp")):
            raise NotACheckpointError(f"{path} is not a Trainer's checkpoint: a folder without {META} and .metadata")
        raise DamagedError(f"{path} is not complete: {' and '.join(missing)} is missing")
    metadata = read_metadata(path)
    items = {
        index: Item(path / info.relative_path, info.offset, info.length)
        for index, info in metadata.storage_data.items()
    }
    tree: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        keys = metadata.planner_data[name] if metadata.planner_data else (name,)
        value = (
            _tensor(name, entry, items)
            if isinstance(entry, TensorStorageMetadata)
            else items[MetadataIndex(name)].load()
        )
        _put(tree, keys, value)
    weights, current = tree.pop("state_dict", {}), tree.pop(CURRENT, {})
    optimizers = [_listed(tree.pop(f"optimizer_{n}")) for n in range(len(tree)) if f"optimizer_{n}" in tree]
    rest = torch.load(path / META, map_location="cpu", weights_only=weights_only)
    return StoredCheckpoint(path, True, weights, optimizers, rest, current)


def read_metadata(path: Path) -> Metadata:
    """What DCP has written where in a folder.

    Raises:
        DamagedError: that cannot be read, or a file is missing or too short for it.
    """
    try:
        metadata = FileSystemReader(path).read_metadata()
        items = [Item(path / i.relative_path, i.offset, i.length) for i in metadata.storage_data.values()]
    except Exception as error:  # it is a pickle, so damage can raise anything
        raise DamagedError(f"{path / '.metadata'} is damaged: {type(error).__name__}: {error}") from None
    _check_sizes(path, items)
    return metadata


def _check_sizes(path: Path, items: Iterable[Item]) -> None:
    needed: dict[Path, int] = {}
    for item in items:
        needed[item.file] = max(needed.get(item.file, 0), item.offset + item.length)
    problems = []
    for file, size in sorted(needed.items()):
        if not file.exists():
            problems.append(f"{file.name} is missing")
        elif (found := file.stat().st_size) < size:
            problems.append(f"{file.name} has {found:,} bytes of {size:,}")
    if problems:
        raise DamagedError(f"{path} is not complete: {'; '.join(problems)}")


def _tensor(name: str, entry: TensorStorageMetadata, items: dict[MetadataIndex, Item]) -> Stored:
    pieces = []
    for chunk in entry.chunks:
        found = items.get(MetadataIndex(name, chunk.offsets))
        if found is None:
            raise DamagedError(f"the metadata have no place for {name} at {list(chunk.offsets)}")
        pieces.append((list(chunk.offsets), list(chunk.sizes), found))
    pieces.sort(key=lambda piece: piece[0])
    shape, dtype = entry.size, entry.properties.dtype

    def read(start: int, stop: int) -> Tensor:
        rows = torch.empty((stop - start, *shape[1:])[: len(shape)], dtype=dtype)
        if not shape:
            pieces[0][2].read_into(rows, 0)
            return rows
        for offsets, sizes, item in pieces:
            first, last = max(start, offsets[0]), min(stop, offsets[0] + sizes[0])
            if first < last:
                rest = tuple(slice(at, at + size) for at, size in zip(offsets[1:], sizes[1:], strict=True))
                item.read_into(rows[(slice(first - start, last - start), *rest)], first - offsets[0])
        return rows

    return Stored(shape, dtype, read)


def _put(tree: dict[Any, Any], keys: Sequence[Any], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value


def _listed(tree: Any) -> Any:
    """Lists in place of what DCP flattened: it keeps no order of keys, and numbers where lists were."""
    groups = tree.get("param_groups", {})
    return {
        "state": tree.get("state", {}),
        "param_groups": [groups[n] for n in sorted(groups)] if isinstance(groups, dict) else groups,
    }
