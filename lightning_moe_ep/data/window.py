"""How long the coming gradient-accumulation window is."""

from __future__ import annotations

import math

import lightning.pytorch as L


def micro_batches_ahead(trainer: L.Trainer) -> int:
    """How many batches the coming optimizer step takes, asked when the first of them is fetched.

    It is `accumulate_grad_batches`, or what `limit_train_batches` and the end of the epoch leave of it:
    Lightning steps at the last batch it takes, and a window that looked past it would count too many tokens.

    Args:
        trainer: the trainer that is fitting.
    """
    window: int = trainer.accumulate_grad_batches
    if math.isinf(trainer.num_training_batches):
        return window
    # Lightning fetches ahead only when it does not know the length, so here `ready` is the number of batches
    # already taken, those before a restart in the middle of an epoch included.
    taken = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    # Counted from the start of the epoch, so a restart with another `accumulate_grad_batches` may be inside a window.
    return max(1, min(window - taken % window, int(trainer.num_training_batches) - taken))
