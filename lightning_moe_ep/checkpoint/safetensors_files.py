"""The tensors of a folder of safetensors files, and reading parts of them, byte range by byte range.

The files are not mapped into memory: what is read is what was asked for, so it can be counted, planned and read ahead.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

SHORT_RUN = 2**15
"""Bytes. Rather than many pieces shorter than this, what lies around them is read in one go."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

Region = tuple[slice, ...]
"""A part of a tensor: for each dimension, from where to where."""


@dataclass(frozen=True)
class FileTensor:
    """Where in a file a tensor is."""

    name: str
    file: Path
    offset: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def runs(self, region: Region) -> list[tuple[int, int]]:
        """The byte ranges of the file that are read for a part of the tensor: offset and length of each."""
        if any(part.start >= part.stop for part in region):
            return []
        covered, inner = self._covered(region)
        length = inner * self.dtype.itemsize
        outer = covered[: self._outer(covered)]
        starts = [0]
        for dim, part in enumerate(outer):
            stride = math.prod(self.shape[dim + 1 :])
            starts = [start + index * stride for start in starts for index in range(part.start, part.stop)]
        if len(outer) < len(covered):
            part = covered[len(outer)]
            starts = [start + part.start * math.prod(self.shape[len(outer) + 1 :]) for start in starts]
        return [(self.offset + start * self.dtype.itemsize, length) for start in starts]

    def read(self, region: Region, files: OpenFiles) -> Tensor:
        """A part of the tensor, on the CPU.

        Raises:
            ValueError: the file ends before the tensor does, or cannot be read.
        """
        out = torch.empty([part.stop - part.start for part in region], dtype=self.dtype)
        self.read_into(out, region, files)
        return out

    def read_into(self, out: Tensor, region: Region, files: OpenFiles) -> None:
        """The same into `out`, which may be of another dtype, on another device, or not contiguous."""
        if not out.numel():
            return
        covered, _ = self._covered(region)
        if covered != region or not out.is_contiguous() or out.dtype != self.dtype or out.device.type != "cpu":
            whole = torch.empty([part.stop - part.start for part in covered], dtype=self.dtype)
            self.read_into(whole, covered, files)
            within = tuple(
                slice(part.start - around.start, part.stop - around.start)
                for part, around in zip(region, covered, strict=True)
            )
            out.copy_(whole[within])
            return
        target = out.view(-1).view(torch.uint8) if out.ndim else out.view(1).view(torch.uint8)
        start = 0
        for offset, length in self.runs(region):
            files.read(self, offset, target[start : start + length])
            start += length

    def _outer(self, region: Region) -> int:
        """How many dimensions lie before the one from which on a part is one piece of the file."""
        for dim in range(len(region) - 1, -1, -1):
            if region[dim] != slice(0, self.shape[dim]):
                return dim
        return 0

    def _covered(self, region: Region) -> tuple[Region, int]:
        """The part that is read for `region`, and the elements of each of its pieces."""
        while True:
            outer = self._outer(region)
            inner = math.prod(part.stop - part.start for part in region[outer:])
            pieces = math.prod(part.stop - part.start for part in region[:outer])
            if pieces <= 1 or inner * self.dtype.itemsize >= SHORT_RUN:
                return region, inner
            region = (*region[:outer], *(slice(0, size) for size in self.shape[outer:]))


class OpenFiles:
    """Reads byte ranges of files, which stay open, and counts the bytes; several threads may read at once."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            # Two threads may come here at once; setdefault keeps one, and the other is closed.
            opened = os.open(file, os.O_RDONLY)
            if self._descriptors.setdefault(file, opened) != opened:
                os.close(opened)
        return self._descriptors[file]

    def read(self, tensor: FileTensor, offset: int, out: Tensor) -> None:
        """Fill `out`, bytes on the CPU, from `offset` of the tensor's file on."""
        buffer = memoryview(out.numpy())
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.descriptor(tensor.file), [buffer[done:]], offset + done)
            except OSError as error:
                raise ValueError(f"{tensor.file} could not be read at tensor {tensor.name}: {error}") from error
            if not count:
                raise ValueError(f"{tensor.file} ends within tensor {tensor.name}; it is cut short")
            done += count
        self.bytes_read += done  # only a report: an update lost between threads would be no harm


def stored_tensors(folder: Path) -> dict[str, FileTensor]:
    """All tensors of a folder: those of `model.safetensors`, or, if there is none, of the files that its index names.

    An index beside a single file is one that an earlier save has left; transformers does not read it either.

    Reads the files' headers only.

    Raises:
        ValueError: there are no such files, one is missing, cut short or damaged, or lacks a tensor that the
            index promises.
    """
    index = folder / INDEX
    if (folder / SINGLE).exists():
        return {tensor.name: tensor for tensor in _tensors_of(folder / SINGLE, first="")}
    if not index.exists():
        raise ValueError(_nothing_to_read(folder))
    try:
        where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        items = list(where.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files: {error!r}") from error
    found: dict[str, FileTensor] = {}
    for name in dict.fromkeys(where.values()):
        first = next(tensor for tensor, file in items if file == name)
        if Path(name).name != name:
            raise ValueError(f"{index} has tensor {first} in {name!r}, which is not a file of its folder")
        if not (folder / name).exists():
            raise ValueError(f"{folder / name}, in which {index.name} has tensor {first}, does not exist")
        found.update((tensor.name, tensor) for tensor in _tensors_of(folder / name, first=first))
    for tensor, file in items:
        if tensor not in found or found[tensor].file.name != file:
            raise ValueError(f"{folder / file} has no tensor {tensor}, which {index.name} has there")
    return found


def _nothing_to_read(folder: Path) -> str:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    hint = (
        f"; {pickles[0]} may hold anything, code too, and is not read: convert it to safetensors where it comes from"
        if pickles
        else ""
    )
    return f"{folder} has neither {SINGLE} nor {INDEX}{hint}"


def _tensors_of(file: Path, *, first: str) -> Iterator[FileTensor]:
    try:
        with safe_open(file, framework="pt"):  # checks the header, and that its tensors fill the file
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        about = f" (tensor {first} should be there)" if first else ""
        raise ValueError(f"{file}{about} is cut short or damaged: {error}") from error
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{file}: tensor {name} is of dtype {entry['dtype']}, which torch has not")
        start, _ = entry["data_offsets"]
        yield FileTensor(name, file, 8 + length + start, DTYPES[entry["dtype"]], torch.Size(entry["shape"]))


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor of this shape."""
    return tuple(slice(0, size) for size in shape)
