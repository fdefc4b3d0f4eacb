"""The hooks between a backward and an optimizer's step: when gradients are reduced, which optimizers there may be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from lightning_moe_ep.callbacks import ExpertGradientCallback
from lightning_moe_ep.fsdp import fsdp_modules, reshard
from lightning_moe_ep.optimizers import agree_on_metrics, check_optimizers


class SteppingStrategy(ModelParallelStrategy):
    """Reduces gradients once a step, or after each backward."""

    gradients: ExpertGradientCallback
    """The gradient callback in use: the user's own, or the strategy's."""

    reduce_every_micro_batch: bool

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers)
        agree_on_metrics(trainer.lightning_module, self.root_device)

    # A user who freezes, releases or toggles parameters means those that optimizers have, not what is gathered of them.

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        assert self.lightning_module is not None
        reshard(self.lightning_module)
        return result

    @override
    def on_validation_end(self) -> None:
        assert self.lightning_module is not None
        reshard(self.lightning_module)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, backward accumulates gradients without reducing them."""
        if self.reduce_every_micro_batch:
            yield
            return
        self._set_reduce_gradients(False)
        try:
            yield
        finally:
            self._set_reduce_gradients(True)

    def _set_reduce_gradients(self, reduces: bool) -> None:
        assert self.lightning_module is not None
        self.gradients.reduces = reduces
        for managed in fsdp_modules(self.lightning_module):
            managed.set_requires_gradient_sync(reduces, recurse=False)
