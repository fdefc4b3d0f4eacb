"""`load_from_checkpoint` of a checkpoint in the folder form, for any LightningModule, in one process."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import torch

# `load_from_checkpoint` reads a checkpoint by `pl_load` of this module, Fabric's private function to load a file, and
# has no other hook before the module is built. Read at lightning 2.6.6; a test fails when it moves.
from lightning.pytorch.core import saving

from lightning_moe_ep.checkpoint.pieces import to_plain
from lightning_moe_ep.checkpoint.stored import META, Stored, open_checkpoint


def open_folders() -> None:
    """Make `load_from_checkpoint` take folders; called once, at import. What is no such folder goes Lightning's way."""
    load = saving.pl_load

    @wraps(load)
    def load_folder_or_file(
        path_or_url: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if isinstance(path_or_url, str | Path) and (Path(path_or_url) / META).is_file():
            return _load_folder(Path(path_or_url), map_location, weights_only)
        return load(path_or_url, map_location=map_location, weights_only=weights_only)

    saving.pl_load = load_folder_or_file


def _load_folder(path: Path, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    opened = open_checkpoint(path, weights_only=weights_only)
    device = _device(map_location)
    state = {
        name: value.whole().to(device) if isinstance(value, Stored) else value
        for name, value in to_plain(opened.pieces, opened.weights).items()
    }
    return {**opened.rest, "state_dict": state}


def _device(map_location: Any) -> Any:
    """Where `torch.load` would put what is on the CPU in the file, as all is in a folder."""
    if callable(map_location):
        mapped = map_location(torch.empty(0).untyped_storage(), "cpu")
        return "cpu" if mapped is None else mapped.device
    return map_location.get("cpu", "cpu") if isinstance(map_location, dict) else map_location or "cpu"
