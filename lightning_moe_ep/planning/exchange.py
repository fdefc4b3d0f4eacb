"""Bytes that a rank sends to have its tokens computed by the experts of one layer, by dispatcher.

The formulas are those of the dispatchers' own code, message by message: what `all_gather` sends follows from the number
of tokens, what `all_to_all` sends from the routing too, which is either given or taken as uniform.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_moe_ep.dispatch import CombineDtype
from lightning_moe_ep.dispatch.auto import COUNTS, costs, distinct_remote_ranks
from lightning_moe_ep.dispatch.overlapped import CHUNKS, MIN_TOKENS

Phase = Literal["forward", "backward", "step"]
"""When something is sent; "step": once an optimizer step, at its boundary."""

Group = Literal["fsdp", "efsdp", "ep", "cp", "replicate", "world"]
"""Over which dimension of the mesh."""

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]

HEADER = 2
"""Bytes of a pair's header in `all_to_all`."""

COUNT = 8
"""Bytes of a count, and of an expert's id."""


@dataclass(frozen=True)
class Message:
    """What a rank hands to collectives for other ranks."""

    what: str
    """Such as "weights gathered"."""

    phase: Phase
    group: Group
    nbytes: float
    """Whole, unless it is an expected value."""

    collective: Collective
    calls: int = 1


@dataclass(frozen=True)
class Rows:
    """What one forward of a layer sends to and receives from other ranks; expected values under uniform routing."""

    sent: float
    """Rows, one a (token, rank) pair."""

    received: float
    pairs_sent: float
    """(token, expert) pairs."""

    pairs_received: float


@dataclass(frozen=True)
class Exchanged:
    """What decides how many bytes one experts module exchanges."""

    num_experts: int
    top_k: int
    hidden_size: int
    row_bytes: int
    """Of an element of the activations."""

    weight_bytes: int
    """Of a routing weight."""

    hidden_has_gradient: bool = True
    """Whether the tokens' gradients travel back."""

    weights_have_gradient: bool = True
    """Whether the routing weights' gradients do."""

    is_trained: bool = True
    """Whether anything at or before the experts is, so that backward comes to them."""

    returns_again: bool = True
    """Whether a recomputation comes as far as the experts' sums, because something after them is kept for backward."""


def uniform_rows(num_tokens: int, *, ep: int, num_experts: int, top_k: int) -> Rows:
    """The expected rows of a rank where each token draws its experts uniformly, without replacement."""
    ranks = distinct_remote_ranks(ep=ep, num_experts=num_experts, top_k=top_k)
    rows, pairs = num_tokens * ranks, num_tokens * top_k * (ep - 1) / ep
    return Rows(sent=rows, received=rows, pairs_sent=pairs, pairs_received=pairs)


def sum_bytes(dispatcher: str, combine_dtype: CombineDtype, row_bytes: int) -> int:
    """Of an element of the experts' sums on their way back; see `CombineDtype`."""
    if combine_dtype == "auto":
        return 4 if dispatcher == "all_gather" else row_bytes
    return 4 if combine_dtype == "float32" else row_bytes


def all_gather(
    layer: Exchanged, num_tokens: int, *, ep: int, combine_dtype: CombineDtype, recomputed: bool
) -> Iterator[Message]:
    """What `all_gather` sends in one forward and backward of a layer.

    Args:
        layer: the experts module.
        num_tokens: of the rank of the group that has most, at least 1: ranks pad to it.
        ep: ranks.
        combine_dtype: in which dtype sums are sent.
        recomputed: whether backward runs the forward once more and keeps nothing that was exchanged.
    """
    others = (ep - 1) * max(1, num_tokens)
    row = others * layer.hidden_size
    of_sums = row * sum_bytes("all_gather", combine_dtype, layer.row_bytes)

    def gathered(what: str, phase: Phase, nbytes: int) -> Message:
        return Message(what, phase, "ep", nbytes, "all_gather")

    def scattered(what: str, phase: Phase, nbytes: int) -> Message:
        return Message(what, phase, "ep", nbytes, "reduce_scatter")

    rows = gathered("tokens to experts", "forward", row * layer.row_bytes)
    weights = gathered("routing", "forward", others * layer.top_k * layer.weight_bytes)
    sums = scattered("sums to tokens", "forward", of_sums)
    yield gathered("routing", "forward", others * layer.top_k * COUNT)
    yield from (rows, weights, sums)
    if not layer.is_trained:
        return
    if recomputed:
        yield from map(_in_backward, (rows, weights, sums) if layer.returns_again else (rows, weights))
    yield gathered("sums to tokens", "backward", of_sums)
    if layer.hidden_has_gradient:
        yield scattered("tokens to experts", "backward", of_sums)  # they are added up in the dtype of the sums
    if layer.weights_have_gradient:
        yield scattered("routing", "backward", others * layer.top_k * 4)


def all_to_all(
    layer: Exchanged, rows: Rows, *, ep: int, combine_dtype: CombineDtype, recomputed: bool, chunks: int = 1
) -> Iterator[Message]:
    """What `all_to_all` sends in one forward and backward of a layer.

    Args:
        layer: the experts module.
        rows: what is routed to and from other ranks.
        ep: ranks.
        combine_dtype: in which dtype sums are sent.
        recomputed: whether backward runs the forward once more and keeps nothing that was exchanged.
        chunks: into how many the tokens are cut; each has messages of its own.
    """
    width, row, total = layer.hidden_size, layer.row_bytes, sum_bytes("all_to_all", combine_dtype, layer.row_bytes)
    counts = (ep - 1) * chunks * (layer.num_experts // ep + 1) * COUNT

    def message(what: str, phase: Phase, nbytes: float) -> Message:
        return Message(what, phase, "ep", nbytes, "all_to_all", chunks)

    there = [
        message("tokens to experts", "forward", rows.sent * width * row),
        message("routing", "forward", rows.pairs_sent * (layer.weight_bytes + HEADER)),
        message("sums to tokens", "forward", rows.received * width * total),
    ]
    yield Message("counts", "forward", "ep", counts, "all_to_all")
    yield from there
    if not layer.is_trained:
        return
    if recomputed:
        yield from map(_in_backward, there)
    yield message("sums to tokens", "backward", rows.sent * width * total)
    if layer.hidden_has_gradient:
        yield message("tokens to experts", "backward", rows.received * width * row)
    if layer.weights_have_gradient:
        yield message("routing", "backward", rows.pairs_received * layer.weight_bytes)


def num_chunks(dispatcher: str, num_tokens: int) -> int:
    """Into how many chunks a dispatcher cuts the tokens of a layer."""
    return CHUNKS if dispatcher == "overlapped" and num_tokens >= CHUNKS * MIN_TOKENS else 1


def chosen_dispatcher(layer: Exchanged, *, ep: int, combine_dtype: CombineDtype) -> str:
    """What dispatcher="auto" takes on GPUs."""
    of_bytes = {size: dtype for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2))}
    gather, exchange = costs(
        ep=ep,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        hidden_size=layer.hidden_size,
        dtype=of_bytes[layer.row_bytes],
        gather_sum_dtype=of_bytes[sum_bytes("all_gather", combine_dtype, layer.row_bytes)],
        exchange_sum_dtype=of_bytes[sum_bytes("all_to_all", combine_dtype, layer.row_bytes)],
        backend="nccl",
    )
    return "all_to_all" if exchange < gather * (1 - COUNTS) else "all_gather"


def _in_backward(message: Message) -> Message:
    return replace(message, phase="backward")
