"""Torch's fake tensors, which have shapes, dtypes and storages of a size, but no memory."""

from __future__ import annotations

# Private; read at torch 2.13.0. A test fails when it moves.
from torch._subclasses.fake_tensor import FakeTensorMode


def no_data() -> FakeTensorMode:
    """A context in which tensors are made and computed without data; those of the meta device may be used in it."""
    return FakeTensorMode(allow_non_fake_inputs=True)
