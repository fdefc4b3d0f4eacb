"""From whole sequences to this rank's slice of them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

IGNORED_LABEL = -100
"""The label of a token for which there is nothing to predict."""


def shard_sequences(batch: Mapping[str, Any], *, rank: int, size: int) -> dict[str, Any]:
    """This rank's slice of a batch of whole sequences, which is the same on all `size` ranks.

    Sequences are padded on the right to a multiple of `size`. Labels are shifted before they are cut, so that the last
    token of a slice is still asked for the first of the next.

    Other entries are passed on as they are. One more of `[B, S]` is cut by a call of its own, which pads it with 0:
    `shard_sequences({"input_ids": weights}, ...)["input_ids"]`; what belongs to labels has to be shifted first, as they
    are: `weights.roll(-1, dims=1)`.

    Args:
        batch: `input_ids [B, S]`, and where given `labels`, or `shift_labels` that are shifted already,
            `attention_mask` and `position_ids` `[B, S]`, or `position_ids [axes, B, S]`.
        rank: which slice, in `[0, size)`.
        size: cp.

    Returns:
        The batch with `input_ids`, `attention_mask` and `position_ids` of `[B, ceil(S / size)]`, and, in place of
        `labels`, `shift_labels` of that shape: what each token is to predict. transformers' losses take it by that name
        (beside any `labels`, without which a model computes no loss); do not shift it again. Positions count from 0 in
        each row where there were none. The mask is always there, but at size 1 it is None where there was none, as
        transformers tells packed sequences apart by their positions only without one.

    Raises:
        ValueError: there are no `input_ids`, or an entry does not fit them or cannot be cut.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise ValueError(
            f"sequences are cut along input_ids [B, S], but there input_ids is {_described(ids)}; give a batch of whole"
            " sequences, as the model would take it"
        )
    mask, positions = _entry(batch, "attention_mask", ids), _entry(batch, "position_ids", ids)
    labels, targets = _entry(batch, "labels", ids), _entry(batch, "shift_labels", ids)
    if targets is None and labels is not None:
        targets = shifted(labels)
    if mask is None and size > 1:
        mask = torch.ones_like(ids)
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)

    part = slice_length(ids.shape[1], size)
    missing = part * size - ids.shape[1]

    def cut(whole: Tensor, padding: int) -> Tensor:
        return F.pad(whole, (0, missing), value=padding).narrow(-1, rank * part, part).contiguous()

    if missing:
        # They go on as they end: positions that begin anew mark another sequence, which padding is not.
        beyond = positions[..., -1:] + torch.arange(1, missing + 1, device=positions.device)
        positions = torch.cat([positions, beyond], dim=-1)
    sharded = {key: value for key, value in batch.items() if key != "labels"}
    sharded["input_ids"] = cut(ids, 0)
    sharded["attention_mask"] = None if mask is None else cut(mask, 0)
    sharded["position_ids"] = positions.narrow(-1, rank * part, part).contiguous()
    if targets is not None:
        sharded["shift_labels"] = cut(targets, IGNORED_LABEL)
    return sharded


def shifted(labels: Tensor) -> Tensor:
    """What each token of whole sequences `[B, S]` is to predict: the label of the next, and nothing at the end."""
    return F.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]


def slice_length(length: int, size: int) -> int:
    """How many tokens each of `size` slices has of a sequence of `length`, the padding of the last among them."""
    return -(-length // size)


def gather_sequences(sliced: Tensor, *, length: int, group: dist.ProcessGroup | None) -> Tensor:
    """Whole sequences from the ranks' slices of them, without what they were padded with; no gradient goes back.

    Every rank of the group calls it.

    Args:
        sliced: `[B, ceil(S / cp), ...]`, this rank's.
        length: S.
        group: the cp group; None at cp=1.

    Returns:
        `[B, S, ...]`, the same on all ranks of the group.
    """
    if group is None:
        return sliced[:, :length]
    slices = [torch.empty_like(sliced, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(slices, sliced.detach().contiguous(), group=group)
    return torch.cat(slices, dim=1)[:, :length]


def _entry(batch: Mapping[str, Any], name: str, ids: Tensor) -> Tensor | None:
    value = batch.get(name)
    if value is None:
        return None
    axes = int(name == "position_ids" and isinstance(value, Tensor) and value.ndim == 3)
    if not isinstance(value, Tensor) or value.shape[axes:] != ids.shape:
        raise ValueError(
            f"{name} is {_described(value)}, but has to be cut with input_ids, which are {_described(ids)}; give it as"
            f" [B, S]{', or as [axes, B, S]' if name == 'position_ids' else ''}"
        )
    return value


def _described(value: object) -> str:
    return f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
