"""Cutting sequences: each token is somewhere once, with the label that follows it in the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from lightning_moe_ep.context_parallel import shard_sequences


def slices(batch: Any, size: int) -> dict[str, Tensor]:
    """The slices of all ranks, one after the other."""
    parts = [shard_sequences(batch, rank=rank, size=size) for rank in range(size)]
    assert len({part["input_ids"].shape for part in parts}) == 1
    cut = ("input_ids", "attention_mask", "position_ids", "shift_labels")
    return {key: torch.cat([part[key] for part in parts], dim=-1) for key in cut if key in parts[0]}


@pytest.mark.parametrize(("length", "size", "padded"), [(8, 2, 8), (7, 2, 8), (5, 4, 8), (1, 4, 4)])
def test_sequences_are_cut_in_order_and_padded_on_the_right(length: int, size: int, padded: int) -> None:
    ids = torch.arange(1, 2 * length + 1).view(2, length)
    whole = slices(BatchEncoding({"input_ids": ids, "labels": ids + 100}), size)
    assert whole["input_ids"].shape == (2, padded)
    assert torch.equal(whole["input_ids"][:, :length], ids)
    assert torch.equal(whole["shift_labels"][:, : length - 1], ids[:, 1:] + 100)
    assert bool((whole["shift_labels"][:, length - 1 :] == -100).all())
    assert whole["attention_mask"].tolist() == [[1] * length + [0] * (padded - length)] * 2
    assert whole["position_ids"].tolist() == [list(range(padded))] * 2  # padding does not look like a new sequence


def test_what_is_given_is_kept() -> None:
    ids = torch.ones(2, 5, dtype=torch.long)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    packed = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 0, 1]])
    batch = {
        "input_ids": ids,
        "attention_mask": mask.bool(),
        "position_ids": packed,
        "weights": mask,
        "shift_labels": ids,
    }
    whole = slices(batch, 2)
    assert whole["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]
    assert whole["attention_mask"].dtype is torch.bool
    assert whole["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2]]
    assert whole["shift_labels"].tolist() == [[1, 1, 1, 1, 1, -100]] * 2
    assert shard_sequences(batch, rank=1, size=2)["weights"] is mask
    assert "labels" not in shard_sequences({"input_ids": ids, "labels": ids}, rank=0, size=2)

    axes = torch.stack([packed, packed + 1, packed + 2])
    parts = [shard_sequences({"input_ids": ids, "position_ids": axes}, rank=r, size=2)["position_ids"] for r in (0, 1)]
    assert parts[0].shape == (3, 2, 3)
    assert torch.equal(torch.cat(parts, dim=-1)[..., :5], axes)
    assert torch.cat(parts, dim=-1)[..., 5].tolist() == [[3, 2], [4, 3], [5, 4]]


def test_one_rank_has_the_same_form() -> None:
    ids = torch.arange(5)[None]
    alone = shard_sequences({"input_ids": ids, "labels": ids}, rank=0, size=1)
    assert alone.keys() == shard_sequences({"input_ids": ids, "labels": ids}, rank=0, size=2).keys()
    assert alone["shift_labels"].tolist() == [[1, 2, 3, 4, -100]]
    assert alone["attention_mask"] is None  # or transformers would not see that sequences are packed
    assert alone["position_ids"].tolist() == [[0, 1, 2, 3, 4]]
    assert shard_sequences({"input_ids": ids[:0]}, rank=1, size=2)["input_ids"].shape == (0, 3)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"inputs_embeds": torch.ones(1, 2, 3)}, "cut along input_ids .B, S., but there input_ids is of type NoneType"),
        ({"input_ids": torch.ones(4)}, r"but there input_ids is a tensor of \[4\]"),
        (
            {"labels": torch.ones(1, 3)},
            r"labels is a tensor of \[1, 3\], but has to be cut with input_ids, which are a te",
        ),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, r"attention_mask is a tensor of \[1, 1, 4, 4\]"),
        ({"position_ids": torch.ones(4)}, r"position_ids is a tensor of \[4\].* or as \[axes, B, S\]"),
        ({"attention_mask": {"full_attention": None}}, "attention_mask is of type dict"),
    ],
)
def test_what_cannot_be_cut(batch: dict[str, Any], words: str) -> None:
    ids = {} if "inputs_embeds" in batch else {"input_ids": torch.ones(1, 4)}
    with pytest.raises(ValueError, match=words):
        shard_sequences({**ids, **batch}, rank=0, size=2)
