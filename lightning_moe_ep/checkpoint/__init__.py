"""Weights and training state, in and out, at any layout."""

from lightning_moe_ep.checkpoint.pretrained import LoadReport, build_pretrained, load_pretrained, read_pretrained
from lightning_moe_ep.checkpoint.training import (
    full_model_state,
    full_optimizer_state,
    load,
    make_way_for_file,
    save_folder,
)

__all__ = [
    "LoadReport",
    "build_pretrained",
    "full_model_state",
    "full_optimizer_state",
    "load",
    "load_pretrained",
    "make_way_for_file",
    "read_pretrained",
    "save_folder",
]
