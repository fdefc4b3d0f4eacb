"""Checkpoints of training state, at any layout."""

from lightning_moe_ep.checkpoint.training import (
    full_model_state,
    full_optimizer_state,
    load,
    make_way_for_file,
    save_folder,
)

__all__ = [
    "full_model_state",
    "full_optimizer_state",
    "load",
    "make_way_for_file",
    "save_folder",
]
