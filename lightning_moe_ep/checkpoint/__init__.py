"""Checkpoints of training state, at any layout."""

from lightning_moe_ep.checkpoint.background import Saver
from lightning_moe_ep.checkpoint.record import KEY, describe
from lightning_moe_ep.checkpoint.recovery import recovering
from lightning_moe_ep.checkpoint.training import full_model_state, full_optimizer_state, load

__all__ = [
    "KEY",
    "Saver",
    "describe",
    "full_model_state",
    "full_optimizer_state",
    "load",
    "recovering",
]
