"""How long the coming gradient-accumulation window is."""

from __future__ import annotations

import math

import lightning.pytorch as L

from lightning_moe_ep.data.position import stands_inside_epoch


class WindowsAhead:
    """How many batches the coming optimizer step takes, asked when the first of them is fetched.

    It is `accumulate_grad_batches`, or what `limit_train_batches` and the end of the epoch leave of it:
    Lightning steps at the last batch it takes, and a window that looked past it would count too many tokens.

    Args:
        trainer: the trainer that is fitting.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._before = 0

    def __call__(self, given: int) -> int:
        """
        Args:
            given: how many batches the loader has given since it began to.
        """
        trainer, window = self._trainer, self._trainer.accumulate_grad_batches
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        if math.isinf(trainer.num_training_batches):
            # Lightning fetches ahead when it does not know the length, and begins to before the loops have started:
            # what was processed before a restart in the middle of an epoch is then all that there is to go by.
            if not given:
                restarts = trainer.fit_loop.restarting and stands_inside_epoch(trainer)
                self._before = batches.processed if restarts else 0
            return window - (self._before + given) % window
        # It does not where it knows the length, so here `ready` is the number of batches already taken, those before
        # a restart in the middle of an epoch included.
        taken = batches.ready
        # Counted from the start of the epoch, so a restart with another `accumulate_grad_batches` may be inside of a
        # window.
        return max(1, min(window - taken % window, int(trainer.num_training_batches) - taken))
