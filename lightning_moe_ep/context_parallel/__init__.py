"""Long sequences: each is cut over the cp ranks, which meet in the attention and nowhere else.

A batch of whole sequences goes in, the same on the ranks of a cp group, and each takes its slice (`slicing.py`). The
model runs on slices; its attention functions exchange heads for tokens and back (`attention.py`).
"""

from lightning_moe_ep.context_parallel.attention import ContextParallelMode, spread_attention, spread_over
from lightning_moe_ep.context_parallel.slicing import (
    IGNORED_LABEL,
    gather_sequences,
    shard_sequences,
    shifted,
    slice_length,
)
from lightning_moe_ep.context_parallel.supported import problem_of_packing

__all__ = [
    "IGNORED_LABEL",
    "ContextParallelMode",
    "gather_sequences",
    "problem_of_packing",
    "shard_sequences",
    "shifted",
    "slice_length",
    "spread_attention",
    "spread_over",
]
