"""Saves that go on while training does: what is saved, what waits for it, and how all ranks learn that it failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist

from lightning_moe_ep import MoEEPStrategy
from lightning_moe_ep.checkpoint import background, durable, saving
from tests.checkpoint.runs import EP2, MIXED, Module, Run, make_trainer, messages, on
from tests.pool import RankPool

ASYNC = {"async_save": True}


def every_step(folder: Path, **more: Any) -> dict[str, Any]:
    """A ModelCheckpoint that keeps the last step's, unless told otherwise."""
    options = {"monitor": "step", "mode": "max", "every_n_train_steps": 1, "save_top_k": 1, "filename": "{step}"}
    return {"dirpath": str(folder), **options, **more}


class Watch(L.Callback):
    """Notes what is in a folder after each step, and opens the gate of the writers after one of them."""

    def __init__(self, folder: Path, gate: threading.Event, opens_after: int) -> None:
        self.folder = folder
        self.gate = gate
        self.opens_after = opens_after
        self.seen: dict[int, set[str]] = {}
        self.linked: dict[int, set[str]] = {}

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        # Before a step, as ModelCheckpoint comes last after one.
        # There are several micro-batches.
        self.seen.setdefault(trainer.global_step, names(self.folder))
        self.linked.setdefault(trainer.global_step, links(self.folder))
        if trainer.global_step == self.opens_after:
            self.gate.set()

    def on_train_end(self, *_: Any) -> None:
        self.gate.set()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.ckpt")} if folder.exists() else set()


def links(folder: Path) -> set[str]:
    """Where the links in a folder lead."""
    return {path.readlink().name for path in folder.glob("*.ckpt") if path.is_symlink()}


@contextmanager
def writing(replacement: Callable[..., Any]) -> Iterator[None]:
    """Let `replacement(save, *args, **kwargs)` stand for DCP's save."""
    original = saving.save
    saving.save = lambda *args, **kwargs: replacement(original, *args, **kwargs)
    try:
        yield
    finally:
        saving.save = original


def _blocked(folder: Path, callbacks: dict[str, Any], opens_after: int, steps: int) -> dict[int, set[str]]:
    """On a rank: a fit in which nothing is written until a step has begun; what was seen before each step."""
    gate = threading.Event()

    def wait_and_save(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert gate.wait(20)
        return save(*args, **kwargs)

    watch = Watch(folder, gate, opens_after)
    with messages(), writing(wait_and_save):
        fitted = make_trainer(Run(EP2, max_steps=steps, callbacks=callbacks, strategy=ASYNC))
        fitted.callbacks.insert(0, watch)
        L.seed_everything(7, verbose=False)
        fitted.fit(Module())
    return watch.seen


def test_training_goes_on_and_changes_nothing_of_what_is_saved(ranks: RankPool, tmp_path: Path) -> None:
    callbacks = every_step(tmp_path, every_n_train_steps=2, save_top_k=-1)
    for seen in ranks.run(_blocked, tmp_path, callbacks, 3, 3, world=2):
        assert seen[2] == set()  # while step 3 is trained
    assert names(tmp_path) == {"step=2.ckpt"}
    resumed = Run(EP2, max_steps=4, resume=str(tmp_path / "step=2.ckpt"))
    for ours, straight in zip(on(ranks, resumed), on(ranks, Run(EP2, max_steps=4)), strict=True):
        assert ours.global_step == 4
        assert all(torch.equal(ours.weights[name], value) for name, value in straight.weights.items())


def _state_around_a_save(path: str) -> list[bool]:
    """On a rank: whether each tensor that is to be written is apart from the model's and the optimizer's memory."""
    apart = []

    def look_and_save(save: Callable[..., Any], state: dict[str, Any], **kwargs: Any) -> Any:
        live = [*module.parameters(), *module.buffers(), *(v for s in optimizer().state.values() for v in s.values())]
        places = {getattr(t, "_local_tensor", t).untyped_storage().data_ptr() for t in live}
        for tensor in background_tensors(state):
            apart.append(tensor.untyped_storage().data_ptr() not in places)
        return save(state, **kwargs)

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(path)

    def background_tensors(state: dict[str, Any]) -> list[torch.Tensor]:
        return [t for t in (getattr(t, "_local_tensor", t) for t in saving.tensors_of(state)) if t.numel()]

    def optimizer() -> torch.optim.Optimizer:
        return fitted.optimizers[0]

    module = Module()
    with messages(), writing(look_and_save):
        fitted = make_trainer(Run(EP2, max_steps=1, strategy=ASYNC))
        fitted.callbacks.append(Save())
        fitted.fit(module)
    return apart


def test_what_is_saved_is_a_copy(ranks: RankPool, tmp_path: Path) -> None:
    for apart in ranks.run(_state_around_a_save, str(tmp_path / "c.ckpt"), world=2):
        assert len(apart) > 20 and all(apart)


def _second_save_blocked(folder: Path, save_last: Any) -> tuple[set[str], set[str]]:
    """On a rank: what is there, and where the link leads, while the save of step 2 is on its way."""
    gate = threading.Event()
    watch = Watch(folder, gate, opens_after=2)

    def wait_and_save(save: Callable[..., Any], *args: Any, storage_writer: Any, **kwargs: Any) -> Any:
        assert "step=2." not in storage_writer.path.name or gate.wait(20)
        return save(*args, storage_writer=storage_writer, **kwargs)

    with messages(), writing(wait_and_save):
        callbacks = every_step(folder, save_last=save_last)
        fitted = make_trainer(Run(EP2, max_steps=3, callbacks=callbacks, strategy=ASYNC))
        fitted.callbacks.insert(0, watch)
        fitted.fit(Module())
    return watch.seen[2], watch.linked[2]


@pytest.mark.parametrize("save_last", ["link", None])
def test_removals_and_links_wait_for_the_save(ranks: RankPool, tmp_path: Path, save_last: Any) -> None:
    last = {"last.ckpt"} if save_last else set()
    for seen, linked in ranks.run(_second_save_blocked, tmp_path, save_last, world=2):
        assert seen == {"step=1.ckpt"} | last
        assert linked == ({"step=1.ckpt"} if save_last else set())
    assert names(tmp_path) == {"step=3.ckpt"} | last
    assert links(tmp_path) == ({"step=3.ckpt"} if save_last else set())


class StopError(Exception):
    pass


def _failing(folder: Path, fails_on: int, at_step: int, steps: int) -> tuple[str, int, set[str], float]:
    """On a rank: the save of one step fails on one rank; how and at which step the fit ends, and what is there."""

    def fail(save: Callable[..., Any], state: dict[str, Any], *, storage_writer: Any, **kwargs: Any) -> Any:
        if f"step={at_step}." in str(storage_writer.path) and dist.get_rank() == fails_on:
            storage_writer.write_data = _raise
        return save(state, storage_writer=storage_writer, **kwargs)

    told, begin = "no error", time.monotonic()
    with messages(), writing(fail):
        of = Run(EP2, max_steps=steps, callbacks=every_step(folder), strategy=ASYNC)
        fitted = make_trainer(of)
        fitted.callbacks.insert(0, Wait())
        try:
            fitted.fit(Module())
        except RuntimeError as error:
            told = str(error)
    return told, fitted.global_step, names(folder), time.monotonic() - begin


class Wait(L.Callback):
    """Lets a save end within the step after it."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        background.wait(trainer.strategy._saver._running)


def _raise(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("fails_on", [0, 1])
@pytest.mark.parametrize(("at_step", "steps"), [(2, 6), (3, 3)], ids=["at the next step", "at the end"])
def test_a_failure_is_raised_on_all_ranks(
    ranks: RankPool, tmp_path: Path, fails_on: int, at_step: int, steps: int
) -> None:
    for told, step, there, seconds in ranks.run(_failing, tmp_path, fails_on, at_step, steps, world=2):
        assert told.startswith(f"the checkpoint {tmp_path}/step={at_step}.ckpt was not saved (")
        assert told.endswith(f" MiB were free there): OSError on rank {fails_on}: [Errno 28] No space left on device")
        assert step == at_step
        assert there == {f"step={at_step - 1}.ckpt"}  # which was to be removed after the save that failed
        assert seconds < 20
    assert not list(tmp_path.glob(".*"))
    assert on(ranks, Run(EP2, max_steps=5, resume=str(tmp_path / f"step={at_step - 1}.ckpt")))[0].global_step == 5


def _stopped(folder: Path) -> tuple[str, set[str]]:
    """On a rank: training fails while a save is on its way."""

    class Fail(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                threading.Timer(0.3, gate.set).start()
                raise StopError

    gate = threading.Event()

    def wait_and_save(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert gate.wait(20)
        return save(*args, **kwargs)

    with messages(), writing(wait_and_save):
        callbacks = every_step(folder, every_n_train_steps=2)
        fitted = make_trainer(Run(EP2, max_steps=5, callbacks=callbacks, strategy=ASYNC))
        fitted.callbacks.insert(0, Fail())
        try:
            fitted.fit(Module())
        except StopError:
            return "stopped", names(folder)
    return "no error", set()


def test_the_end_of_a_failed_training_waits(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_stopped, tmp_path, world=2) == [("stopped", {"step=2.ckpt"})] * 2
    durable.check_complete(tmp_path / "step=2.ckpt")


def _two_in_a_row(folder: Path) -> tuple[list[str], bool, int]:
    """On a rank: the order of what happens when the second save comes before the first has ended; a save after fit."""
    events = []

    def slow(save: Callable[..., Any], *args: Any, storage_writer: Any, **kwargs: Any) -> Any:
        name = storage_writer.path.name
        events.append(f"begin {name}")
        time.sleep(0.3)
        result = save(*args, storage_writer=storage_writer, **kwargs)
        events.append(f"end {name}")
        return result

    class SaveTwo(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(folder / "a")
            trainer.save_checkpoint(folder / "b")
            events.append("both asked for")

    reduced = 0
    original = dist.all_reduce

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal reduced
        reduced += kwargs.get("group") is fitted.strategy.meshes.host_group
        return original(*args, **kwargs)

    with messages(), writing(slow):
        fitted = make_trainer(Run(MIXED, max_steps=1, strategy=ASYNC))
        fitted.callbacks.append(SaveTwo())
        fitted.fit(Module())
        fitted.save_checkpoint(folder / "after")
        there = (folder / "after").exists()
        for callback in [callback for callback in fitted.callbacks if isinstance(callback, SaveTwo)]:
            fitted.callbacks.remove(callback)
        background.dist.all_reduce = count
        try:
            fitted.strategy._saver.step(fitted.strategy.meshes.host_group)
        finally:
            background.dist.all_reduce = original
    return events, there, reduced


def test_one_save_at_a_time(ranks: RankPool, tmp_path: Path) -> None:
    for events, there, reduced in ranks.run(_two_in_a_row, tmp_path, world=4):
        assert events[:3] == ["begin .a.saving", "end .a.saving", "begin .b.saving"] or events[:4] == [
            "begin .a.saving",
            "end .a.saving",
            "both asked for",
            "begin .b.saving",
        ]
        assert events.index("both asked for") < events.index("end .b.saving")
        assert there and reduced == 0


def _slow(callbacks: dict[str, Any]) -> None:
    """On a rank: a fit in which a save takes longer than a step."""

    def slow(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return save(*args, **kwargs)

    with messages(), writing(slow):
        make_trainer(Run(EP2, max_steps=3, callbacks=callbacks, strategy=ASYNC)).fit(Module())


def test_names_that_are_on_their_way_are_taken(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_slow, every_step(tmp_path, filename="same", save_top_k=-1), world=2)
    assert names(tmp_path) == {"same.ckpt", "same-v1.ckpt", "same-v2.ckpt"}


def test_files_are_not_written_in_the_background() -> None:
    with pytest.raises(ValueError, match="async_save=True writes folders: it needs save_distributed_checkpoint=True"):
        MoEEPStrategy(async_save=True, save_distributed_checkpoint=False)
