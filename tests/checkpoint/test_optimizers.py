"""Optimizer state that is not in a checkpoint: an error where it was lost, none where there never was any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from lightning_moe_ep.checkpoint.durable import MARKER
from lightning_moe_ep.checkpoint.record import KEY, NEVER_STEPPED
from lightning_moe_ep.checkpoint.saving import META
from tests.checkpoint import runs
from tests.checkpoint.runs import EP2, FORMS, MIXED, Run, make_trainer, run
from tests.pool import RankPool

forms = pytest.mark.parametrize("form", FORMS)


class WithIdlePart(runs.Module):
    """A part of the model has no gradient for the first `idle` steps."""

    def configure_model(self) -> None:
        super().configure_model()
        self.extra = nn.Linear(64, 64)
        with torch.no_grad():
            self.extra.weight.fill_(0.1)
            self.extra.bias.fill_(0.1)

    def training_step(self, number: int, batch_idx: int) -> Tensor:
        loss = super().training_step(number, batch_idx)
        if self.trainer.global_step < self.hparams.idle:
            return loss
        return loss + self.extra(torch.ones(2, 64)).square().mean()


def _fit(of: Run, idle: int) -> tuple[Any, list[str]]:
    runs.L.seed_everything(of.seed, verbose=False)
    module = WithIdlePart(of.model, of.optimizer, idle=idle)
    fitted = make_trainer(of)
    fitted.fit(module, ckpt_path=of.resume)
    if of.save:
        fitted.save_checkpoint(of.save)
    (optimizer,) = fitted.optimizers
    stepped = [name for name, p in module.named_parameters() if p in optimizer.state]
    whole = {n: p.detach().full_tensor().clone() for n, p in module.named_parameters() if n.startswith("extra")}
    return whole, stepped


@forms
def test_a_part_that_was_idle_goes_on_so(ranks: RankPool, tmp_path: Path, form: str) -> None:
    path = str(tmp_path / "c.ckpt")
    straight = ranks.run(_fit, Run(EP2, form, max_steps=8), 6, world=2)
    ranks.run(_fit, Run(EP2, form, max_steps=4, save=path), 6, world=2)
    for at in (EP2, MIXED):
        still = ranks.run(_fit, Run(at, form, max_steps=5, resume=path), 6, world=at.world)
        assert not any(name.startswith("extra") for name in still[0][1])
    for (ours, stepped), (right, _) in zip(
        ranks.run(_fit, Run(EP2, form, max_steps=8, resume=path), 6, world=2), straight, strict=True
    ):
        assert {"extra.weight", "extra.bias"} <= set(stepped)
        assert all(torch.equal(ours[name], right[name]) for name in right)
        assert not torch.equal(right["extra.bias"], torch.full_like(right["extra.bias"], 0.1))


def _fails(of: Run) -> str:
    with pytest.raises(KeyError) as raised:
        run(of)
    return str(raised.value)


@forms
def test_what_was_not_trained_then_cannot_be_gone_on_with(ranks: RankPool, tmp_path: Path, form: str) -> None:
    path = str(tmp_path / "c.ckpt")
    ranks.run(run, Run(EP2, form, save=path, hparams={"frozen": "router"}), world=2)
    for told in ranks.run(_fails, Run(EP2, form, resume=path, max_steps=5), world=2):
        assert "c.ckpt lacks optimizer state of 2 parameter(s), model.blocks.0.moe.router.weight first" in told


def _change(path: Path, form: str) -> None:
    """Say that all parameters were stepped."""
    file = path / META if form == "folder" else path
    content = torch.load(file)
    assert content[KEY].pop(NEVER_STEPPED)[0]
    torch.save(content, file)


@forms
def test_what_was_lost_is_missed(ranks: RankPool, tmp_path: Path, form: str) -> None:
    path = tmp_path / "c.ckpt"
    ranks.run(_fit, Run(EP2, form, max_steps=2, save=str(path)), 6, world=2)
    if form == "folder":
        (path / MARKER).unlink()  # as the file changes its size
    _change(path, form)
    for told in ranks.run(_loses, Run(EP2, form, max_steps=3, resume=str(path)), world=2):
        assert "lacks optimizer state of 2 parameter(s), extra.weight first" in told


def _loses(of: Run) -> str:
    with pytest.raises(KeyError) as raised:
        _fit(of, 6)
    return str(raised.value)


class Grouped(runs.Module):
    """Its groups have names and a scheduler's `initial_lr`, or neither."""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        if not self.hparams.scheduled:
            for group in made["optimizer"].param_groups:
                del group["initial_lr"]
            return made["optimizer"]
        for number, group in enumerate(made["optimizer"].param_groups):
            group["name"] = f"group {number}"
        return made


def _groups(of: Run, scheduled: bool, found_in: str | None = None) -> tuple[list[dict[str, Any]], set[float]]:
    runs.L.seed_everything(of.seed, verbose=False)
    module = Grouped(of.model, of.optimizer, scheduled=scheduled)
    fitted = make_trainer(of)
    fitted.fit(module, ckpt_path=of.resume)
    if of.save:
        fitted.save_checkpoint(of.save)
    if found_in:
        again = make_trainer(Run(of.at, of.form, options={"default_root_dir": found_in}))
        finder = Tuner(again).lr_find(module, num_training=4, early_stop_threshold=None, update_attr=False)
        assert finder is not None and len(finder.results["lr"]) == 4
    (optimizer,) = fitted.optimizers
    return optimizer.param_groups, {float(state["step"]) for state in optimizer.state.values()}


@forms
def test_options_that_came_later_are_the_optimizers_own(ranks: RankPool, tmp_path: Path, form: str) -> None:
    path, place = str(tmp_path / "c.ckpt"), tmp_path / "found"
    place.mkdir()
    ranks.run(_groups, Run(EP2, form, save=path), False, str(place), world=2)
    assert not list(place.iterdir()), "lr_find, whose own scheduler gives groups an initial_lr, cleans up"
    for groups, steps in ranks.run(_groups, Run(EP2, form, max_steps=runs.N + 1, resume=path), True, world=2):
        assert [(group["name"], group["initial_lr"]) for group in groups] == [("group 0", 3e-3), ("group 1", 3e-3)]
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        assert steps == {runs.N + 1}
