"""From whole sequences to this rank's slice of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def shard_sequences(batch: Mapping[str, Any], *, rank: int, size: int) -> dict[str, Any]:
    """This rank's slice of a batch of whole sequences, which is the same on all `size` ranks.

    Sequences are padded on the right to a multiple of `size`. Labels are shifted before they are cut, so that the last
    token of a slice is still asked for the first of the next.

    Args:
        batch: `input_ids [B, S]`, and where given `labels`, `attention_mask` and `position_ids` `[B, S]`, or
            `position_ids [axes, B, S]`; other entries are passed on as they are.
        rank: which slice, in `[0, size)`.
        size: cp.

    Returns:
        The batch with `input_ids`, `attention_mask` and `position_ids` of `[B, ceil(S / size)]` (the mask and the
        positions always), and, in place of `labels`, `shift_labels` of that shape: what each token is to predict,
        which is what transformers' losses take by that name; do not shift them again.

    Raises:
        ValueError: an entry does not fit `input_ids`, or cannot be cut.
    """
    raise NotImplementedError("context parallelism is not built yet; use cp=1")
