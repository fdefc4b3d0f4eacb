"""The `all_to_all` dispatcher: a token crosses to a rank once, however many of its experts are there.

Each rank sends the rows that other ranks need, with which experts want each row and at what weight; the receiver sums
the weighted outputs of its experts for a row and sends that one row back. For experts on the token's own rank nothing
is sent. One exchange of counts (and with it the one host sync), one of routing, one of rows, one back; backward runs
the transposed exchanges with the sizes that are known by then.

The tokens may be cut into chunks, so that the exchange of one runs beside the experts' work on another: `overlapped`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_ep.dispatch.base import Dispatcher, ExpertGroup, Experts, register_dispatcher
from lightning_moe_ep.dispatch.collectives import Exchange, Splits, exchange_routing
from lightning_moe_ep.dispatch.local import run_experts
from lightning_moe_ep.remember import once
from lightning_moe_ep.rows import RowGroups

NEW_ROW = 1 << 14
"""Bit of a pair's 16-bit header: the pair begins another row. The lower bits are the expert on the receiver."""


@register_dispatcher("all_to_all")
class AllToAllDispatcher(Dispatcher):
    """One row a (token, rank) pair, combined where it was computed."""

    def __init__(self, expert_group: ExpertGroup) -> None:
        super().__init__(expert_group)
        if expert_group.num_local > NEW_ROW:
            raise ValueError(f"all_to_all takes at most {NEW_ROW} experts a rank, not {expert_group.num_local}")

    def num_chunks(self, num_tokens: int) -> int:
        """Into how many chunks the tokens are cut; the same on every rank of the group."""
        return 1

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Experts) -> Tensor:
        group = self.expert_group
        dtype = group.sum_dtype(hidden.dtype, hidden=hidden.dtype)
        chunks = once(lambda: self._plan(top_k_index))
        weights = top_k_weights.flatten()
        arriving = [Exchange(hidden.index_select(0, c.sent_tokens), c.rows, group.group) for c in chunks]
        routing = [chunk.exchange_routing(weights, group.group) for chunk in chunks]
        returning = []
        for chunk, own, rows, (expert_of_pair, row_of_pair, weight_of_pair) in zip(
            chunks, hidden.split([c.num_tokens for c in chunks]), arriving, routing, strict=True
        ):
            order = torch.argsort(expert_of_pair, stable=True)
            partial = run_experts(
                experts,
                torch.cat([own, rows.wait()]),  # this rank's tokens first, then the rows that came
                chunk.groups,
                row_of_pair=row_of_pair.index_select(0, order),
                weight_of_pair=weight_of_pair.index_select(0, order),
            )
            own_sums, sums = partial.split([chunk.num_tokens, sum(chunk.rows.receive)])
            returning.append((own_sums, Exchange(sums.to(dtype), chunk.rows.transposed(), group.group)))
        outputs = [
            own_sums.index_add(0, chunk.sent_tokens - chunk.first_token, sums.wait().float())
            for chunk, (own_sums, sums) in zip(chunks, returning, strict=True)
        ]
        for chunk, output in zip(chunks, outputs, strict=True):
            sent, received = sum(chunk.rows.send), sum(chunk.rows.receive)
            row, sum_of_row = hidden.shape[1] * hidden.element_size(), output.shape[1] * dtype.itemsize
            group.statistics.count(
                rows_sent=sent,
                rows_received=received,
                bytes_sent=sent * row + received * sum_of_row,
                pairs_of_expert=chunk.groups.sizes,
            )
        return torch.cat(outputs).to(hidden.dtype)

    def _plan(self, top_k_index: Tensor) -> list[Chunk]:
        return plan_chunks(top_k_index, self.expert_group, self.num_chunks(len(top_k_index)))


@dataclass(frozen=True)
class Chunk:
    """What a chunk of this rank's tokens sends and receives. A pair is a (token, expert) pair."""

    first_token: int
    num_tokens: int

    rows: Splits
    """Rows to and from each rank; none to itself."""

    pairs: Splits
    """Pairs to and from each rank; none to itself."""

    groups: RowGroups
    """How many pairs each of this rank's experts computes: of its own tokens, and of the rows that come."""

    sent_tokens: Tensor
    """`[sum(rows.send)]`: the token of each row to send, sorted by rank."""

    sent_pairs: Tensor
    """`[sum(pairs.send)]`: each pair to send, as a position in the flattened `[T, K]`, sorted by rank, then token."""

    headers: Tensor
    """`[sum(pairs.send)]` int16; see `NEW_ROW`."""

    own_pairs: Tensor
    """`[P_own]`: the pairs whose expert is on this rank, as positions in the flattened `[T, K]`."""

    own_experts: Tensor
    """`[P_own]` int16: their experts, numbered on this rank."""

    own_rows: Tensor
    """`[P_own]`: their tokens, counted from the chunk's first."""

    def exchange_routing(self, weights: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        """Experts, rows and weights, each `[P]`, of all pairs that this rank computes; its own tokens' come first.

        Rows count from the chunk's first token; the rows that come follow the chunk's tokens.
        """
        came, headers = exchange_routing(weights.index_select(0, self.sent_pairs), self.headers, self.pairs, group)
        rows = self.num_tokens - 1 + torch.cumsum(headers >= NEW_ROW, dim=0)
        own = weights.index_select(0, self.own_pairs)
        return (
            torch.cat([self.own_experts, headers & (NEW_ROW - 1)]),
            torch.cat([self.own_rows, rows]),
            torch.cat([own, came]),
        )


def plan_chunks(top_k_index: Tensor, group: ExpertGroup, num_chunks: int) -> list[Chunk]:
    """Sort the pairs by chunk, rank and token, and tell every rank how many rows and pairs it will get.

    One small all-to-all, and the layer's one host sync.
    """
    (num_tokens, top_k), ep, num_local = top_k_index.shape, group.size, group.num_local
    bounds = [num_tokens * c // num_chunks for c in range(num_chunks + 1)]
    expert = top_k_index.flatten()
    target = expert // num_local
    if num_chunks > 1:
        token = torch.arange(num_tokens, device=expert.device)
        chunk_of_token = sum((token >= bound).long() for bound in bounds[1:-1])
        target = target + (chunk_of_token * ep).repeat_interleave(top_k, output_size=len(expert))
    # A pair that chooses no expert comes last and is left out once the host knows how many there are.
    target = torch.where((expert < 0) | (expert >= group.num_experts), num_chunks * ep, target)
    order = torch.argsort(target, stable=True)
    target, token = target.index_select(0, order), order // top_k
    new = torch.ones_like(target)
    new[1:] = (target[1:] != target[:-1]) | (token[1:] != token[:-1])

    # Per chunk and rank: how many pairs for each expert there, and how many rows.
    to_expert = target * num_local + expert.index_select(0, order) % num_local
    pairs = new.new_zeros((num_chunks * ep + 1) * num_local).scatter_add_(0, to_expert, torch.ones_like(new))
    rows = new.new_zeros(num_chunks * ep + 1).scatter_add_(0, target, new)
    pairs, rows = pairs[:-num_local], rows[:-1]
    send = torch.cat([pairs.view(num_chunks, ep, num_local), rows.view(num_chunks, ep, 1)], dim=2)
    send = send.transpose(0, 1).contiguous()  # [ep, chunks, L + 1]
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group.group)
    of_experts = receive[:, :, :num_local].sum(dim=0)  # [chunks, L]
    sent, received, counts = _on_host(_pairs_and_rows(send), _pairs_and_rows(receive), of_experts)

    num_pairs = sum(sent[rank][c][0] for rank in range(ep) for c in range(num_chunks))
    order, token, new = order[:num_pairs], token[:num_pairs], new[:num_pairs]
    row = new.cumsum(0) - 1
    num_rows = sum(sent[rank][c][1] for rank in range(ep) for c in range(num_chunks))
    token_of_row = token.new_empty(num_rows).scatter_(0, row, token)
    header = (expert.index_select(0, order) % num_local + new * NEW_ROW).short()
    me = group.group.rank()
    chunks = []
    pair_at = _Cursor(sent[rank][c][0] for c in range(num_chunks) for rank in range(ep))
    row_at = _Cursor(sent[rank][c][1] for c in range(num_chunks) for rank in range(ep))
    for c in range(num_chunks):
        pair_parts, row_parts = pair_at.take(ep), row_at.take(ep)
        own = pair_parts.pop(me)
        row_parts.pop(me)
        chunks.append(
            Chunk(
                first_token=bounds[c],
                num_tokens=bounds[c + 1] - bounds[c],
                rows=_splits(sent, received, c, 1, me),
                pairs=_splits(sent, received, c, 0, me),
                groups=RowGroups.of(of_experts[c], counts[c]),
                sent_tokens=_join(token_of_row, row_parts),
                sent_pairs=_join(order, pair_parts),
                headers=_join(header, pair_parts),
                own_pairs=order[own],
                own_experts=header[own] & (NEW_ROW - 1),
                own_rows=token[own] - bounds[c],
            )
        )
    return chunks


def _pairs_and_rows(counts: Tensor) -> Tensor:
    """From `[ep, chunks, L + 1]` to `[ep, chunks, 2]`."""
    return torch.stack([counts[:, :, :-1].sum(dim=2), counts[:, :, -1]], dim=2)


def _on_host(*tensors: Tensor) -> list[list]:
    """The values of integer tensors as nested lists, in one host sync."""
    values = iter(torch.cat([tensor.flatten() for tensor in tensors]).tolist())

    def nest(shape: tuple[int, ...]) -> list:
        return [nest(shape[1:]) if len(shape) > 1 else next(values) for _ in range(shape[0])]

    return [nest(tuple(tensor.shape)) for tensor in tensors]


def _splits(sent: list[list[list[int]]], received: list[list[list[int]]], chunk: int, what: int, me: int) -> Splits:
    def of(counts: list[list[list[int]]]) -> list[int]:
        return [0 if rank == me else of_rank[chunk][what] for rank, of_rank in enumerate(counts)]

    return Splits(send=of(sent), receive=of(received))


def _join(tensor: Tensor, parts: list[slice]) -> Tensor:
    return torch.cat([tensor[part] for part in parts])


class _Cursor:
    """Cuts a sequence of lengths into consecutive slices."""

    def __init__(self, lengths: Iterator[int]) -> None:
        ends = list(accumulate(lengths))
        self._slices = iter([slice(start, end) for start, end in zip([0, *ends], ends, strict=False)])

    def take(self, number: int) -> list[slice]:
        return [next(self._slices) for _ in range(number)]
