"""A Hugging Face folder's safetensors files, written in any order and a few rows at a time.

All names, shapes and dtypes are known beforehand: the headers are written first, and each value at its place.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lightning_moe_ep.checkpoint.safetensors_files import DTYPES, INDEX, SINGLE

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsFiles:
    """The files of a folder, and their index if there are several."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], *, max_shard_bytes: int) -> None:
        """Write the headers.

        Args:
            folder: where to.
            tensors: names, shapes and dtypes, on the meta device.
            max_shard_bytes: how large a file may be, unless a single tensor is larger.

        Raises:
            TypeError: safetensors does not know a dtype.
        """
        self._rows: dict[str, tuple[Path, int, int, int]] = {}
        """By tensor: the file, where it begins, bytes of a row, bytes of all."""
        shards = _divide(tensors, max_shard_bytes)
        files = (
            [SINGLE]
            if len(shards) == 1
            else [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
        )
        for file, names in zip(files, shards, strict=True):
            self._write_header(folder / file, {name: tensors[name] for name in names})
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
                "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _write_header(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        # As safetensors does, so that each begins at a multiple of its elements' size.
        places = {}
        for name, tensor in sorted(tensors.items(), key=lambda entry: -entry[1].dtype.itemsize):
            if tensor.dtype not in _NAMES:
                raise TypeError(f"{name} is of {tensor.dtype}, which safetensors files do not hold")
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.nbytes],
            }
            places[name] = end
            end += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        for name, place in places.items():
            row = math.prod(tensors[name].shape[1:]) * tensors[name].dtype.itemsize
            self._rows[name] = (path, 8 + len(text) + place, row, tensors[name].nbytes)

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Write rows of a tensor, the first of which is its row `first`."""
        path, begin, row, nbytes = self._rows[name]
        offset = first * row
        if offset + values.nbytes > nbytes:
            raise ValueError(f"{values.nbytes} bytes at {offset} do not fit into the {nbytes} of {name}")
        write_at(path, begin + offset, values)


def _divide(tensors: Mapping[str, Tensor], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def write_at(path: Path, offset: int, values: Tensor) -> None:
    """Write a tensor's bytes into a file that is there."""
    if not values.numel():
        return
    data = memoryview(values.contiguous().reshape(-1).view(torch.uint8).numpy())
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
