"""Flash attention by its definition, on CPU, where transformers would import the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash


def install() -> None:
    """Has every flash implementation of this process be this one."""
    functions = (whole, in_pieces, None, flash._pad_input, flash._unpad_input)
    process = flash._lazy_define_process_function(in_pieces)
    flash.lazy_import_flash_attention = lambda *_, **__: (functions, (process, None))


def whole(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """`[B, S, heads, D]`."""
    rows = [one(q, k, v, **options) for q, k, v in zip(query, key, value, strict=True)]
    return torch.stack(rows)


def in_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    s_aux: Tensor | None = None,
) -> Tensor:
    """`[tokens, heads, D]` of many sequences."""
    assert cu_seqlens_q.dtype == torch.int32 and int(cu_seqlens_q[-1]) == len(query) == len(key)
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q == max_seqlen_k
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    lengths = cu_seqlens_q.diff().tolist()
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "s_aux": s_aux}
    pieces = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
    return torch.cat([one(q, k, v, dropout_p=dropout_p, **options) for q, k, v in pieces])


def one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    s_aux: Tensor | None = None,
) -> Tensor:
    """`[S, heads, D]`."""
    assert dropout_p == 0.0 and causal
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (softmax_scale or query.shape[-1] ** -0.5)
    places = torch.arange(len(query))
    back = places[:, None] - places
    seen = (back >= 0) & ((back <= window_size[0]) if window_size[0] >= 0 else True)
    scores = scores.masked_fill(~seen, -torch.inf)
    if s_aux is not None:
        assert len(s_aux) == query.shape[1]
        scores = torch.cat([scores, s_aux[:, None, None].expand(-1, len(query), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., : len(key)], value)
