"""Weights and training state, in and out, at any layout."""

from lightning_moe_ep.checkpoint.background import Saver
from lightning_moe_ep.checkpoint.pretrained import (
    LoadReport,
    build_pretrained,
    leave_unread,
    load_pretrained,
    pretrained_config,
    read_pretrained,
)
from lightning_moe_ep.checkpoint.record import KEY, describe
from lightning_moe_ep.checkpoint.recovery import recovering
from lightning_moe_ep.checkpoint.resumption import Resumption
from lightning_moe_ep.checkpoint.stored import CURRENT
from lightning_moe_ep.checkpoint.training import full_model_state, full_optimizer_state, load

__all__ = [
    "CURRENT",
    "KEY",
    "LoadReport",
    "Resumption",
    "Saver",
    "build_pretrained",
    "describe",
    "full_model_state",
    "full_optimizer_state",
    "leave_unread",
    "load",
    "load_pretrained",
    "pretrained_config",
    "read_pretrained",
    "recovering",
]
