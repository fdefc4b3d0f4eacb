"""Where the data of tensors are in a file that `torch.save` writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import skip_data

from lightning_moe_ep.fake_tensors import no_data
from lightning_moe_ep.trees import map_leaves


def load_without_data(file: Any) -> Any:
    """What `torch.load` gives, but without reading the data of tensors; ask `data_offset` where they are."""
    with no_data():
        return torch.load(file, map_location="cpu", weights_only=True)


def data_offset(tensor: Tensor) -> int:
    """Where, in bytes from the file's beginning, the first element is; of a tensor from `load_without_data`."""
    # torch 2.13: what torch.load notes in this mode.
    begin: int = tensor.untyped_storage()._checkpoint_offset
    return begin + int(tensor.storage_offset()) * tensor.dtype.itemsize


def save_without_data(tree: Any, path: Path, *, is_tensor: Callable[[Any], bool]) -> None:
    """Write what `torch.save` would, but leave only the room for the data of tensors.

    Args:
        tree: has leaves with a `shape` and a `dtype` in place of tensors.
        path: the file.
        is_tensor: whether a leaf is one of these.
    """
    with no_data(), skip_data(materialize_fake_tensors=True):
        torch.save(
            map_leaves(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype) if is_tensor(leaf) else leaf, tree),
            path,
        )
