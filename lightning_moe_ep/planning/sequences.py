"""Bytes that a rank sends so that an attention sees whole sequences, of which each rank of a cp group holds a slice.

The heads of an attention go in; its all-to-alls come out, message by message, as Ulysses sends them: queries, keys and
values to the ranks that have their heads, the outputs back to those that have their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_moe_ep.context_parallel.ulysses import repeats_of
from lightning_moe_ep.planning.exchange import COUNT, Message

KNOWN = 3
"""Integers that ranks tell each other of a token: its id, its place, and whether it is padding."""


@dataclass(frozen=True)
class Attention:
    """What decides how many bytes one attention exchanges."""

    name: str
    """Its module's path."""

    heads: int
    kv_heads: int
    width: int
    """Of a head of queries and keys."""

    value_width: int
    nbytes: int
    """Of an element."""

    is_trained: bool = True
    """Whether anything at or before it is, so that backward comes to it."""


def exchanges(attention: Attention, num_tokens: int, *, cp: int, recomputed: bool) -> Iterator[Message]:
    """What an attention sends in one forward and backward.

    Args:
        attention: which.
        num_tokens: of a rank.
        cp: ranks.
        recomputed: whether backward runs the forward once more.
    """
    kv_heads = attention.kv_heads * repeats_of(attention.heads, attention.kv_heads, cp)
    there = attention.heads * attention.width + kv_heads * (attention.width + attention.value_width)
    back = attention.heads * attention.value_width
    # Of the heads of each token a rank keeps its own.
    to_others = num_tokens * attention.nbytes * (cp - 1)
    calls = 1 if attention.width == attention.value_width else 3
    both = (
        Message("tokens to heads", "forward", "cp", to_others * there // cp, "all_to_all", calls),
        Message("heads to tokens", "forward", "cp", to_others * back // cp, "all_to_all"),
    )
    yield from both
    if attention.is_trained:
        yield from (replace(message, phase="backward") for message in (both * 2 if recomputed else both))


def told(num_tokens: int, *, cp: int) -> Message:
    """What a rank tells the others of its tokens in one forward of the model."""
    return Message("masks and positions", "forward", "cp", (cp - 1) * num_tokens * KNOWN * COUNT, "all_gather")
