"""Averages of the weights: against torch's formulas, in validation, in checkpoints of both forms, at other layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core import saving
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_moe_ep import (
    HuggingFaceExport,
    MoEEPStrategy,
    ShardedWeightAveraging,
    convert_to_file,
    convert_to_folder,
    export_to_hugging_face,
)
from tests.checkpoint.exported import FamilyModule
from tests.checkpoint.runs import EP2, FORMS, FSDP, MIXED, SINGLE, WITH_BIAS, At, Module, Run, make_trainer
from tests.checkpoint.test_export import files_of, same
from tests.contract import contract
from tests.matrix import mostly_more
from tests.models import make_batch
from tests.parity import Case, CaseModule, plain, trainer, worst
from tests.pool import RankPool

N = 4
DECAY = 0.7

Weights = dict[str, Tensor]


def _state(module: L.LightningModule) -> Weights:
    return plain(module.model, dict(module.model.state_dict()))


# Against torch's formulas.


class Watch(L.Callback):
    """Keeps the whole weights after each step, in validation, and at the end."""

    def __init__(self) -> None:
        self.steps: list[Weights] = []
        self.validated: list[Weights] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step > len(self.steps):
            self.steps.append(_state(pl_module))

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.validated.append(_state(pl_module))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.end = _state(pl_module)


class WithBuffers(Module):
    """Its state has a buffer that moves, one of whole numbers, a frozen weight and a tied one."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.register_buffer("moving", torch.zeros(3))
        self.model.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.model.blocks[0].norm.weight.requires_grad_(False)
        self.model.head.tied = nn.Linear(64, 64, bias=False)
        self.model.head.tied.weight = self.model.head.weight

    def training_step(self, number: int, batch_idx: int) -> Tensor:
        self.model.moving += 1
        self.model.count += 1
        return super().training_step(number, batch_idx)


def _watched(of: Run, decay: float | None, every: int, start: int) -> tuple[dict[str, Any], list[str], Weights]:
    """What was seen; also what is held, and the weights when a second fit has begun."""
    L.seed_everything(7, verbose=False)
    module, watch = WithBuffers(of.model), Watch()
    averaging = ShardedWeightAveraging(decay, update_every_n_steps=every, update_starting_at_step=start)
    fitting = make_trainer(
        replace(of, options={"callbacks": [watch, averaging], "limit_val_batches": 1, "val_check_interval": 4})
    )
    fitting.fit(module)
    held, end = list(averaging._averages), watch.end
    fitting.fit_loop.max_epochs = 2
    fitting.fit_loop.epoch_loop.max_steps = of.max_steps
    first = Watch()
    fitting.callbacks.append(_Starts(first))
    fitting.fit(module)
    return {"steps": watch.steps, "validated": watch.validated, "ends": [end, _state(module)]}, held, first.steps[0]


class _Starts(L.Callback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.watch.steps.append(_state(pl_module))


def _right(steps: list[Weights], decay: float | None, every: int, start: int) -> list[Weights]:
    """After each step, by torch's formulas; of what is not floating the model's own."""
    update = get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)
    averages, found = None, []
    count = 0
    for number, weights in enumerate(steps):
        if number >= start and number % every == 0:
            if averages is None:
                averages = {name: tensor.clone() for name, tensor in weights.items()}
            else:
                names = [name for name, tensor in weights.items() if tensor.is_floating_point()]
                update([averages[name] for name in names], [weights[name] for name in names], count)
            count += 1
        own = {name: tensor for name, tensor in weights.items() if not tensor.is_floating_point()}
        found.append({name: t.clone() for name, t in {**(averages or weights), **own}.items()})
    return found


@contract(
    "Callbacks",
    "`WeightAveraging`, `EMAWeightAveraging`",
    "work as `ShardedWeightAveraging`: validation and exports have the averages, checkpoints both, at any layout",
)
@pytest.mark.parametrize(("decay", "every", "start"), [(DECAY, 1, 0), (None, 2, 1)], ids=["ema", "swa"])
def test_averages_are_those_of_torch(ranks: RankPool, decay: float | None, every: int, start: int) -> None:
    for seen, held, again in ranks.run(_watched, Run(EP2, max_steps=6), decay, every, start, world=2):
        steps, validated = seen["steps"], seen["validated"]
        right = _right(steps, decay, every, start)
        assert len(steps) == 6 and len(validated) == 1 + 3 + 1  # also before each fit
        for of_step, step in zip(validated[1:], (1, 3, 5, 5), strict=True):
            assert worst(of_step, right[step])[0] < 1e-6
        for end in seen["ends"]:
            assert worst(end, right[-1])[0] < 1e-6 < worst(right[-1], steps[-1])[0]
        assert end["head.tied.weight"].equal(end["head.weight"]) and end["count"] == 12
        assert worst(again, steps[-1])[0] == 0  # training goes on from where it was
        assert "model.moving" in held and "model.head.weight" in held
        assert not {"model.count", "model.head.tied.weight", "model.blocks.0.norm.weight"} & set(held)


# Checkpoints.


@dataclass
class SaveAt(L.Callback):
    path: str
    step: int = N
    weights_only: bool = False

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            trainer.save_checkpoint(self.path, weights_only=self.weights_only)


def _run(of: Run) -> tuple[Weights, Weights, int]:
    """The averages and the trained weights at the end."""
    L.seed_everything(of.seed, verbose=False)
    module = (WithBuffers if of.model == WITH_BIAS else Module)(of.model)
    averaging = ShardedWeightAveraging(DECAY)
    saves = [SaveAt(of.save, weights_only=of.weights_only)] if of.save else []
    options = {**of.options, "callbacks": [averaging, *saves]}
    make_trainer(replace(of, options=options)).fit(module, ckpt_path=of.resume)
    averages = _state(module)
    averaging._show_trained()
    return averages, _state(module), averaging.num_averaged


def _on(ranks: RankPool, of: Run) -> tuple[Weights, Weights, int]:
    assert of.at is not None
    return ranks.run(_run, of, world=of.at.world)[0]


def _check_same(found: tuple[Weights, Weights, int], right: tuple[Weights, Weights, int]) -> None:
    for ours, theirs in zip(found[:2], right[:2], strict=True):
        error, name = worst(ours, theirs)
        assert error < 1e-5, f"{name} is off by {error:.1e}"
    assert found[2] == right[2]


@pytest.mark.parametrize("model", mostly_more([WITH_BIAS, "6 experts of odd width", "a list of experts"], WITH_BIAS))
@pytest.mark.parametrize("form", FORMS)
def test_resuming_at_another_layout_equals_not_stopping(ranks: RankPool, tmp_path: Path, form: str, model: str) -> None:
    path = str(tmp_path / "c.ckpt")
    right = _on(ranks, Run(EP2, form, model, max_steps=2 * N, save=path))
    at_save = _on(ranks, Run(EP2, form, model))
    assert worst(at_save[0], at_save[1])[0] > 1e-3
    others: list[At] = [FSDP] if model == WITH_BIAS else [MIXED, SINGLE]
    for at in others:
        _check_same(_on(ranks, Run(at, form, model, resume=path, max_steps=2 * N, seed=8)), right)
    # All but a training reads the averages, in plain Lightning too; so it is in the other form.
    other = tmp_path / "other"
    convert_to_file(path, other) if form == "folder" else convert_to_folder(path, other)
    for loaded in (path, other):
        state = _load_plain(loaded)
        assert worst({n.removeprefix("model."): t for n, t in state.items()}, at_save[0])[0] < 1e-5
    other_form = next(name for name in FORMS if name != form)
    _check_same(_on(ranks, Run(EP2, other_form, model, resume=str(other), max_steps=2 * N, seed=8)), right)


def _load_plain(path: str | Path) -> Weights:
    return saving.pl_load(path, map_location="cpu", weights_only=True)["state_dict"]


def _saved_in_other_ways(folder: str) -> tuple[Weights, Weights, Weights, Weights, Weights]:
    """What validation reads, with and without the callback; without it in training; of weights only; meanwhile."""
    path = f"{folder}/c"
    right = _run(Run(EP2, max_steps=N))[0]
    _run(Run(EP2, max_steps=N + 2, save=path, strategy={"async_save": True}))
    _run(Run(EP2, max_steps=N, save=f"{path}-weights", weights_only=True))
    read = []
    for callbacks in ([], [ShardedWeightAveraging(DECAY)]):
        module = Module()
        trainer(MoEEPStrategy(ep=2), callbacks=callbacks).validate(module, ckpt_path=path, verbose=False)
        read.append(_state(module))
    module = Module()
    trainer(MoEEPStrategy(ep=2)).validate(module, ckpt_path=f"{path}-weights", verbose=False)
    read.append(_state(module))
    module = Module()
    make_trainer(Run(EP2, max_steps=N)).fit(module, ckpt_path=path)  # no step is left
    return right, *read, _state(module)


def test_what_reads_the_averages_and_what_the_weights(ranks: RankPool, tmp_path: Path) -> None:
    trained = _on(ranks, Run(EP2, max_steps=N))[1]
    for right, *read, in_training in ranks.run(_saved_in_other_ways, str(tmp_path), world=2):
        for averages in read:
            assert worst(averages, right)[0] < 1e-6
        assert worst(in_training, trained)[0] < 1e-6 < worst(trained, right)[0]


def _exported(folder: str) -> tuple[float, float]:
    """A fit that exports, and its checkpoint: how far the exported weights are from the averages and the trained."""
    L.seed_everything(3, verbose=False)
    averaging = ShardedWeightAveraging(DECAY)
    export = HuggingFaceExport(f"{folder}/live")
    fitted = trainer(MoEEPStrategy(ep=2), max_steps=3, callbacks=[export, averaging])
    fitted.fit(FamilyModule("mixtral"))
    fitted.save_checkpoint(f"{folder}/c")
    live = dict(AutoModelForCausalLM.from_pretrained(f"{folder}/live", dtype="auto").state_dict())
    averages = _state(fitted.lightning_module)
    averaging._show_trained()
    trained = _state(fitted.lightning_module)
    return worst(live, averages)[0], worst(live, trained)[0]


def test_exports_have_the_averages(ranks: RankPool, tmp_path: Path) -> None:
    for of_averages, of_trained in ranks.run(_exported, str(tmp_path), world=2):
        assert of_averages == 0 and of_trained > 1e-4
    export_to_hugging_face(tmp_path / "c", tmp_path / "command")
    assert same(files_of(tmp_path / "command"), files_of(tmp_path / "live"))


def _bf16() -> tuple[set[torch.dtype], Weights, Weights]:
    L.seed_everything(7, verbose=False)
    averaging, module = ShardedWeightAveraging(0.999), Small(Case(steps=8))
    trainer(MoEEPStrategy(ep=2), max_epochs=1, precision="bf16-true", callbacks=[averaging]).fit(module)
    averages = plain(module.model, {n.removeprefix("model."): t for n, t in averaging.averages().items()})
    return {tensor.dtype for tensor in averages.values()}, averages, _state(module)


class Small(CaseModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step({key: value.bfloat16() for key, value in batch.items()}, batch_idx)


def test_averages_of_bf16_weights_are_in_fp32(ranks: RankPool) -> None:
    for dtypes, averages, shown in ranks.run(_bf16, world=2):
        assert dtypes == {torch.float32}
        assert {tensor.dtype for tensor in shown.values()} == {torch.bfloat16}
        assert worst(shown, averages)[0] < 2**-8
        assert any(not tensor.equal(tensor.bfloat16().float()) for tensor in averages.values())


# What goes wrong.


class Fails(CaseModule):
    def val_dataloader(self) -> Any:
        return DataLoader([make_batch("own", 8, seed=1)], batch_size=None)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.before = _state(self)
        raise RuntimeError("no validation")


def _fails() -> tuple[bool, list[str]]:
    module, watch = Fails(Case(steps=3)), Watch()
    with pytest.raises(RuntimeError, match="no validation"):
        trainer(
            MoEEPStrategy(ep=2),
            max_epochs=1,
            num_sanity_val_steps=0,
            callbacks=[watch, ShardedWeightAveraging(DECAY)],
        ).fit(module)
    after = _state(module)
    trained = worst(after, watch.steps[-1])[0] == 0 < worst(module.before, after)[0]
    messages = []
    for callbacks in (
        [WeightAveraging()],
        [EMAWeightAveraging()],
        [StochasticWeightAveraging(1e-2)],
        [ShardedWeightAveraging(), ShardedWeightAveraging(0.9)],
    ):
        with pytest.raises((NotImplementedError, ValueError, RuntimeError)) as error:
            trainer(MoEEPStrategy(ep=2), callbacks=callbacks, max_epochs=1).fit(CaseModule(Case()))
        messages.append(str(error.value))
    return trained, messages


@contract("Callbacks", "`StochasticWeightAveraging`", "refused: use `ShardedWeightAveraging(decay=None)`")
def test_an_exception_leaves_the_trained_weights_and_others_are_refused(ranks: RankPool) -> None:
    for trained, messages in ranks.run(_fails, world=2):
        assert trained
        for message, name in zip(
            messages, ["WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging"], strict=False
        ):
            assert message == (
                f"the callback {name} copies the whole model, which a sharded one does not allow; use"
                " lightning_moe_ep.ShardedWeightAveraging(decay=0.999), or decay=None for an equal average (SWA)"
            )
        assert "more than one" in messages[-1] and "ShardedWeightAveraging" in messages[-1]


def test_another_strategy_is_refused() -> None:
    callbacks = [ShardedWeightAveraging()]
    plain = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=callbacks)
    with pytest.raises(ValueError, match=r"is for MoEEPStrategy, not for SingleDeviceStrategy, whose checkpoints"):
        plain.fit(CaseModule(Case()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.5}, "decay=1.5 must be from 0 to 1, such as 0.999, or None for an equal average"),
        ({"update_every_n_steps": 0}, "update_every_n_steps=0 must be at least 1, and update_starting_at_step=0"),
        ({"update_starting_at_step": -1}, "update_starting_at_step=-1 at least 0"),
    ],
    ids=str,
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardedWeightAveraging(**options)
