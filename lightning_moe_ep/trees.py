"""Tensors in what modules take and return: tuples, dictionaries and outputs of transformers, nested as they come."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

# Private; read at torch 2.13.0. A test fails when it moves.
from torch.utils._pytree import tree_leaves, tree_map


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `function` of each leaf, which is whatever is no container, in its place."""
    return tree_map(function, tree)


def containers_copied(tree: Any) -> Any:
    """`tree` with containers of its own, which may be changed, and the same tensors."""
    return map_leaves(lambda leaf: leaf if isinstance(leaf, Tensor) else copy.copy(leaf), tree)


def leaves_of(tree: Any) -> list[Any]:
    """All leaves of `tree`, in order."""
    return tree_leaves(tree)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`tree` with `function` of each tensor in its place; all else stays as it is."""
    return tree_map(lambda value: function(value) if isinstance(value, Tensor) else value, tree)


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors in `tree`, in order."""
    return [value for value in tree_leaves(tree) if isinstance(value, Tensor)]
