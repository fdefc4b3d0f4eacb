"""Trainings that are killed at random moments around their saves; each goes on from the newest complete checkpoint."""

from __future__ import annotations

import faulthandler
import random
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_moe_ep.checkpoint import durable
from lightning_moe_ep.checkpoint.saving import META
from tests.checkpoint.runs import EP2, Module, Run, make_trainer, messages
from tests.forks import CONTEXT, start

WORLD = 2
FOR_EVER = 10_000
"""Steps."""


class Tell(L.Callback):
    """Says through a pipe when a step begins, and which it is."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.pipe.send(trainer.global_step)


def train(
    rank: int,
    store: str,
    folder: Path,
    form: str,
    strategy: dict[str, Any],
    save_last: Any,
    resume: str | None,
    steps: int,
    told: Connection | None,
) -> dict[str, np.ndarray]:
    """A rank: goes on from a checkpoint, and saves each step."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=20)
    )
    faulthandler.dump_traceback_later(25)  # a rank that hangs shows where
    L.seed_everything(7, verbose=False)
    keeps = {"dirpath": str(folder), "filename": "{step}", "monitor": "step", "mode": "max", "save_top_k": 2}
    of = Run(
        EP2,
        form,
        max_steps=steps,
        callbacks={**keeps, "every_n_train_steps": 1, "save_last": save_last, "enable_version_counter": False},
        strategy=strategy,
        options={"accumulate_grad_batches": 1},
    )
    module = Module()
    with messages():
        fitted = make_trainer(of)
        if told is not None:
            fitted.callbacks.insert(0, Tell(told))
        fitted.fit(module, ckpt_path=resume)
    # As arrays: a tensor would be sent as shared memory of this process, which ends.
    whole = {name: p.full_tensor().detach().numpy() for name, p in module.model.named_parameters()}
    dist.destroy_process_group()
    return whole


def newest(folder: Path, form: str) -> tuple[Path, int] | None:
    """The complete checkpoint of the latest step; all that have a name must be complete."""
    steps = {}
    for path in folder.glob("*.ckpt"):
        if form == "folder":
            assert (path / durable.MARKER).is_file()
            durable.check_complete(path)
        steps[path] = torch.load(path / META if path.is_dir() else path)["global_step"]
    return max(steps.items(), key=lambda item: item[1]) if steps else None


def run_and_kill(tmp_path: Path, form: str, strategy: dict[str, Any], save_last: Any, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    folder, begun = tmp_path / "checkpoints", 0
    for number in range(kills):
        # In turn: all ranks, only rank 0, only rank 1; from `last`, or from the newest by name.
        victims = [[0, 1], [0], [1]][number % 3]
        found = newest(folder, form) if folder.exists() else None
        last = folder / "last.ckpt"
        resume: str | None = "last" if number % 2 or found is None else str(found[0])
        goes_on_at = 0
        if found is not None:
            goes_on_at = found[1]
            if resume == "last":
                goes_on_at = torch.load(last / META if last.is_dir() else last)["global_step"] if last.exists() else 0
                assert goes_on_at >= found[1] - 1
        store = str(tmp_path / f"store-{number}")
        told, theirs = CONTEXT.Pipe()
        ranks = [
            start(train, rank, store, folder, form, strategy, save_last, resume, FOR_EVER, None if rank else theirs)
            for rank in range(WORLD)
        ]
        theirs.close()
        try:
            # Killed at any moment of the first to third step and the save after it, however long these take here.
            moments = []
            for _ in range(draw.randint(2, 4)):
                if not told.poll(30):
                    raise AssertionError(f"does not go on: {[pipe.recv() for _, pipe in ranks if pipe.poll(1)]}")
                moments.append((told.recv(), time.monotonic()))
            assert moments[0][0] == goes_on_at
            time.sleep(draw.uniform(0.0, moments[-1][1] - moments[-2][1]))
            for victim in victims:
                ranks[victim][0].kill()
            for rank, (process, pipe) in enumerate(ranks):
                if rank not in victims:  # it ends by itself, with an error
                    assert pipe.poll(30), f"rank {rank} hangs"
                    ok, error = pipe.recv()
                    assert not ok and "Error" in error
                process.join(30)
                assert process.exitcode is not None, f"rank {rank} does not end"
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()
        begun += goes_on_at > 0
    assert begun >= kills // 2, "too few were killed after a save"

    found = newest(folder, form)
    assert found is not None
    path, step = found
    assert step >= kills // 2
    resumed = _on_both(tmp_path / "store-end", tmp_path / "end", form, {}, None, str(path), step + 2)
    straight = _on_both(tmp_path / "store-straight", tmp_path / "straight", form, {}, None, None, step + 2)
    assert all(np.array_equal(resumed[name], value) for name, value in straight.items())


def _on_both(store: Path, *args: Any) -> dict[str, np.ndarray]:
    ranks = [start(train, rank, str(store), *args, None) for rank in range(WORLD)]
    answers = []
    for process, pipe in ranks:
        assert pipe.poll(60)
        answers.append(pipe.recv())
        process.join()
    assert all(ok for ok, _ in answers), answers
    return answers[0][1]


WAYS = [("folder", {}, True), ("folder", {"async_save": True}, "link")]
IDS = ["at once", "meanwhile"]


@pytest.mark.parametrize(("form", "strategy", "save_last"), WAYS[1:], ids=IDS[1:])
def test_killed_trainings_go_on(tmp_path: Path, form: str, strategy: dict[str, Any], save_last: Any) -> None:
    run_and_kill(tmp_path, form, strategy, save_last, kills=3, seed=1)


@pytest.mark.more
@pytest.mark.parametrize(("form", "strategy", "save_last"), [*WAYS, ("file", {}, True)], ids=[*IDS, "a file"])
def test_trainings_killed_ten_times_go_on(tmp_path: Path, form: str, strategy: dict[str, Any], save_last: Any) -> None:
    run_and_kill(tmp_path, form, strategy, save_last, kills=10, seed=2)
