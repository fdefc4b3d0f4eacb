"""The bigram baseline against the same model written out as loops."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from datasets import Dataset

from lightning_moe_ep.data import bigram, bigram_loss


def _blocks(seed: int, lengths: list[int], vocab_size: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _by_hand(train: list[list[int]], val: list[list[int]], vocab_size: int) -> float:
    counts = [[1] * vocab_size for _ in range(vocab_size)]
    for block in train:
        for earlier, later in pairwise(block):
            counts[earlier][later] += 1
    costs = [
        -math.log(counts[earlier][later] / sum(counts[earlier])) for block in val for earlier, later in pairwise(block)
    ]
    return sum(costs) / len(costs)


@pytest.mark.parametrize("chunk", [1, 10, 1 << 20])
def test_equals_the_loops(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(bigram, "_CHUNK_TOKENS", chunk)
    train, val = _blocks(1, [9, 1, 0, 30, 2], 7), _blocks(2, [5, 12], 7)
    expected = _by_hand(train, val, 7)
    arrays = bigram_loss([np.array(b, dtype=np.uint8) for b in train], (torch.tensor(b) for b in val), 7)
    assert arrays == pytest.approx(expected, rel=1e-12)


def test_takes_datasets() -> None:
    train, val = _blocks(3, [16] * 20, 11), _blocks(4, [16] * 5, 11)
    datasets = [Dataset.from_dict({"input_ids": blocks}).with_format("torch") for blocks in (train, val)]
    assert bigram_loss(*datasets, 11) == pytest.approx(_by_hand(train, val, 11), rel=1e-12)


def test_counting_stops_at_max_tokens() -> None:
    train, val = _blocks(5, [8] * 10, 5), _blocks(6, [8] * 3, 5)
    expected = _by_hand([*train[:2], train[2][:4]], val, 5)
    assert bigram_loss(map(np.array, train), map(np.array, val), 5, max_tokens=20) == pytest.approx(expected)


def test_unseen_pairs_cost_the_logarithm_of_the_vocabulary() -> None:
    assert bigram_loss([], [np.array([1, 2])], 100) == pytest.approx(math.log(100))


def test_refuses_a_large_vocabulary() -> None:
    with pytest.raises(ValueError, match=r"vocab_size=50257 is outside \[1, 4096\]: .* 2,525,766,049 entries"):
        bigram_loss([], [], 50257)


@pytest.mark.parametrize("wrong", [-1, 7])
def test_refuses_ids_outside_the_vocabulary(wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"token id {wrong} is outside \[0, 7\)"):
        bigram_loss([np.array([0, wrong])], [np.array([0, 1])], 7)


def test_refuses_nothing_to_score() -> None:
    with pytest.raises(ValueError, match="no pair of tokens to score"):
        bigram_loss([np.array([0, 1])], [np.array([1])], 7)
