"""What FSDP2 keeps gathered: a forward has the weights of the moment, and parameters are those that optimizers have."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe_ep import MoEEPStrategy
from tests.contract import contract
from tests.models import HIDDEN, OwnModel
from tests.parity import trainer, whole, worst
from tests.pool import RankPool

STEPS = 4


class Plain(L.LightningModule):
    """Roots before and after the blocks, trained alike on all ranks, so that one process has the same gradients."""

    def configure_model(self) -> None:
        torch.manual_seed(5)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.model = OwnModel()
        self.last = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.model(self.first(x)))

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(3)
        return DataLoader([torch.randn(9, HIDDEN, generator=generator) for _ in range(STEPS)], batch_size=None)

    val_dataloader = train_dataloader

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Looks(Plain):
    """A forward for the log, between backward and step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self(torch.ones(2, HIDDEN))


class Releases(Plain):
    """The first layer is trained from the second epoch on."""

    def configure_model(self) -> None:
        super().configure_model()
        self.first.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.first.requires_grad_(self.current_epoch > 0)


class Toggles(Plain):
    """Two optimizers by turns, of which one has the roots."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(parameters, lr=0.5)
            for parameters in (self.model.parameters(), [*self.first.parameters(), *self.last.parameters()])
        ]


KINDS = (Plain, Looks, Releases, Toggles)


def _trained(kind: type[Plain], ep: int) -> dict[str, Tensor]:
    module = kind()
    trainer(MoEEPStrategy(ep=ep), max_epochs=2).fit(module)
    return whole(dict(module.named_parameters()))


def _in_one_process(kind: type[Plain]) -> dict[str, Tensor]:
    module = kind()
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    L.Trainer(accelerator="cpu", devices=1, max_epochs=2, enable_model_summary=False, **quiet).fit(module)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@contract("Gradients", "parameters that are frozen or released in the course of a fit")
@contract("Gradients", "a forward between backward and the optimizer's step")
@pytest.mark.parametrize("kind", KINDS)
def test_every_forward_has_the_weights_of_the_moment(ranks: RankPool, kind: type[Plain]) -> None:
    right = _in_one_process(kind)
    for ep in (1, 2):
        error, name = worst(ranks.run(_trained, kind, ep, world=2)[0], right)
        assert error < 1e-5, f"ep={ep}: {name} is off by {error:.1e}"


def _finetuning() -> None:
    with pytest.raises(NotImplementedError, match=r"BackboneFinetuning compares parameters .* call requires_grad_"):
        trainer(MoEEPStrategy(ep=2), max_epochs=1, callbacks=[BackboneFinetuning()]).fit(Plain())


@contract("Callbacks", "`BackboneFinetuning`", "refused: call requires_grad_ in on_train_epoch_start")
def test_finetuning_callbacks_are_refused(ranks: RankPool) -> None:
    ranks.run(_finetuning, world=2)
