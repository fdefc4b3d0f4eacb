"""What a Trainer knows after a run, from the rank that ran to the process that the user is in."""

from __future__ import annotations

import operator
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerState
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_STEPPED = "_batches_that_stepped"


@dataclass(frozen=True)
class Results:
    """Rank 0's."""

    returned: Any
    """By the Trainer's method."""

    checkpoint: Path | None
    """One with the weights, if there is one that stays."""

    state: TrainerState
    metrics: dict[str, dict[str, Any]]
    callbacks: dict[str, dict[str, Any]]
    """What each has to say in a checkpoint, by its key."""

    progress: dict[str, Any]
    """Of the loop that fits: epochs, batches, steps."""


def collect(trainer: L.Trainer, returned: Any, checkpoint: Path | None) -> Results:
    """On rank 0, after the run."""
    states = {}
    for callback in trainer.callbacks:
        state = move_data_to_device(callback.state_dict(), "cpu")
        try:
            pickle.dumps(state)
        except Exception as error:
            rank_zero_warn(f"The state of {type(callback).__name__} stays on the ranks: it cannot be sent ({error})")
            continue
        states[callback.state_key] = state
    progress = trainer.fit_loop.state_dict()
    stepped = progress["epoch_loop.state_dict"][_STEPPED]
    return Results(
        returned=move_data_to_device(returned, "cpu"),
        checkpoint=checkpoint,
        state=trainer.state,
        metrics=move_data_to_device({kind: dict(getattr(trainer, kind)) for kind in _METRICS}, "cpu"),
        callbacks=states,
        # What loops keep beside their progress (positions in loaders) is for a checkpoint inside of a run.
        progress={
            **{key: value for key, value in progress.items() if not key.endswith("state_dict")},
            _STEPPED: stepped,
        },
    )


def restore(trainer: L.Trainer, results: Results) -> None:
    """Have the user's Trainer know what rank 0's knew."""
    trainer.state = results.state
    progress = dict(results.progress)
    trainer.fit_loop.epoch_loop._batches_that_stepped = progress.pop(_STEPPED)
    for path, value in progress.items():
        operator.attrgetter(path)(trainer.fit_loop).load_state_dict(value)
    for kind, metrics in results.metrics.items():
        known = getattr(trainer, kind)
        known.clear()
        known.update(metrics)
    for callback in trainer.callbacks:
        state = results.callbacks.get(callback.state_key)
        if not state:
            continue
        if isinstance(callback, ModelCheckpoint):
            callback.dirpath = state["dirpath"]  # as it was found on the ranks
            callback._last_global_step_saved = trainer.global_step  # here there is nothing to save, when a run fails
        callback.load_state_dict(state)


def write(results: Results, file: Path) -> None:
    torch.save(results, file)


def read(file: Path) -> Results:
    return torch.load(file, weights_only=False)
