"""The floor that a language model has to beat: a table of which token follows which.

In go blocks of token ids to count and blocks to score. Out comes one number, nats per token, to be drawn
beside a validation loss: a model that stays above it has not learned more than which token follows which.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset

MAX_VOCAB_SIZE = 4096
"""The table has `vocab_size` squared entries of 8 bytes, so 128 MiB at this size."""

_CHUNK_TOKENS = 1 << 20


def bigram_loss(
    train: Dataset | Iterable[Any],
    val: Dataset | Iterable[Any],
    vocab_size: int,
    *,
    max_tokens: int = 20_000_000,
) -> float:
    """Mean loss, in nats per token, of an add-one smoothed bigram model counted on `train`.

    Each block of S tokens is counted and scored at its positions 1 to S-1, as a causal model's loss is.

    Args:
        train: blocks to count: 1-D integer arrays, or a dataset with the column `input_ids`.
        val: blocks to score, in either form.
        vocab_size: number of token ids, V; at most 4096, for the table is `[V, V]`.
        max_tokens: counting stops after this many training tokens.

    Returns:
        The mean over the scored positions of `-log((n(a, b) + 1) / (n(a) + V))`.

    Raises:
        ValueError: `vocab_size` is outside [1, 4096], a token id is outside `[0, V)`, or `val` holds no pair.
    """
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size={vocab_size} is outside [1, {MAX_VOCAB_SIZE}]: the table of pairs would have "
            f"{vocab_size**2:,} entries; use bytes or a smaller tokenizer for this baseline"
        )
    counts = _pair_counts(_chunks(train, max_tokens), vocab_size)
    scored = _pair_counts(_chunks(val, None), vocab_size)
    total = int(scored.sum())
    if total == 0:
        raise ValueError("val holds no pair of tokens to score; give it at least one block of 2 tokens or more")
    cost = np.log(counts.sum(1, keepdims=True) + vocab_size) - np.log(counts + 1)  # [V, V]
    return float((scored * cost).sum() / total)


def _pair_counts(chunks: Iterable[list[npt.NDArray[np.integer]]], vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each token follows each, `[V, V]`; rows are the earlier token."""
    table = np.zeros(vocab_size**2, dtype=np.int64)
    for blocks in chunks:
        tokens = np.concatenate(blocks).astype(np.int64)
        low, high = tokens.min(initial=0), tokens.max(initial=0)
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"token id {low if low < 0 else high} is outside [0, {vocab_size}); "
                "vocab_size must be that of the tokenizer that made the blocks"
            )
        pairs = tokens[:-1] * vocab_size + tokens[1:]
        # The last token of a block and the first of the next one are no pair.
        inside = np.ones(len(tokens), dtype=bool)
        ends = np.cumsum([len(block) for block in blocks])
        inside[ends[ends > 0] - 1] = False
        table += np.bincount(pairs[inside[:-1]], minlength=vocab_size**2)
    return table.reshape(vocab_size, vocab_size)


def _chunks(blocks: Dataset | Iterable[Any], max_tokens: int | None) -> Iterator[list[npt.NDArray[np.integer]]]:
    """Blocks in lists of about `_CHUNK_TOKENS` tokens: few enough to hold, enough for numpy to be quick."""
    chunk: list[npt.NDArray[np.integer]] = []
    held = read = 0
    for block in _arrays(blocks):
        if max_tokens is not None and read + len(block) > max_tokens:
            block = block[: max_tokens - read]
        chunk.append(block)
        held += len(block)
        read += len(block)
        if held >= _CHUNK_TOKENS:
            yield chunk
            chunk, held = [], 0
        if read == max_tokens:
            break
    if chunk:
        yield chunk


def _arrays(blocks: Dataset | Iterable[Any]) -> Iterator[npt.NDArray[np.integer]]:
    if isinstance(blocks, Dataset):
        # A thousand rows at a time: row by row, a dataset of this size takes minutes.
        for rows in blocks.with_format("numpy", columns=["input_ids"]).iter(batch_size=1024):
            yield from rows["input_ids"]
    else:
        yield from (np.asarray(block) for block in blocks)
