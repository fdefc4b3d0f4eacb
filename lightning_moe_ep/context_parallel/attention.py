"""Attention over whole sequences, on ranks that hold slices of them."""

from __future__ import annotations

from typing import Literal

from torch import nn

from lightning_moe_ep.mesh import Meshes

ContextParallelMode = Literal["ulysses", "ring"]
"""How attention sees whole sequences: all-to-all of heads for tokens and back, or keys and values passed around."""


def spread_attention(model: nn.Module, meshes: Meshes, *, mode: ContextParallelMode) -> None:
    """Have every attention of `model` attend to whole sequences, of which each cp rank holds a slice.

    Before anything is sharded; nothing is changed if it raises.

    Args:
        model: a plain model.
        meshes: their cp group is who holds the slices.
        mode: how.

    Raises:
        NotImplementedError: tokens meet in it otherwise than through transformers' attention interface, or `mode`
            cannot serve it here.
        ValueError: cp does not divide a number of heads.
    """
    raise NotImplementedError("context parallelism is not built yet; use cp=1")
