"""The hooks of a strategy whose ranks take equally many batches: each a line or two into `data/`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast, get_args

from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_moe_ep.data import (
    Host,
    PredictionLoader,
    Uneven,
    agree,
    deal_out,
    in_lockstep,
    innermost,
    resumable,
    seed_workers_alike,
)
from lightning_moe_ep.fsdp import drop_unreduced_gradients
from lightning_moe_ep.strategy.saving import SavingStrategy


class LoadingStrategy(SavingStrategy):
    """No rank waits for one that has no more data, and the ranks of a cp group have the same."""

    cp: int

    def __init__(self, *, uneven: Uneven, **options: Any) -> None:
        if uneven not in get_args(Uneven):
            raise ValueError(f"uneven={uneven!r} is not known; use one of {list(get_args(Uneven))}")
        super().__init__(**options)
        self.uneven = uneven
        self._injects = False  # Lightning is about to inject samplers into the loaders of `predict`
        self._injected = False  # it has, into the one that comes to `process_dataloader`

    @override
    def barrier(self, name: str | None = None) -> None:
        # The one moment between a user's predict_dataloader(), which may ask for the sampler's arguments as well, and
        # Lightning's own request.
        self._injects = name == "predict_dataloader()" and self.world_size > 1
        self._injected = False
        super().barrier(name)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._injects:
            self._injected = True
            return {"num_replicas": 1, "rank": 0}
        return self._share

    @property
    def _share(self) -> dict[str, int]:
        """Which part of all samples is this rank's, and that of the others in its cp group."""
        return {"num_replicas": self.world_size // self.cp, "rank": self.global_rank // self.cp}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Let all ranks take equally many batches, and keep the position in a training epoch."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        host = Host(self.meshes.host_group, cp=self.cp)
        name = f"{trainer.state.stage.dataloader_prefix}_dataloader"
        # A CombinedLoader of the user's keeps what stood around its loaders in an earlier run.
        dataloader = innermost(dataloader)
        if self._injected:
            self._injected = False
            deal_out(dataloader, **self._share)
        seed_workers_alike(dataloader, host)
        lengths = agree(dataloader, host, name)
        if trainer.predicting:
            if (lengths.sure or host.size == 1) and host.cp == 1:
                return dataloader
            longest = None if lengths.known is None else max(lengths.known)
            return PredictionLoader(
                cast(Iterable[Any], dataloader),
                host=host,
                trainer=trainer,
                name=name,
                length=longest,
                compare=not lengths.exact,
            )
        if trainer.training:
            self._resumption.restore_random()
            if lengths.sure:
                dataloader = resumable(dataloader, trainer)
        return in_lockstep(dataloader, lengths, trainer, host=host, name=name, uneven=self.uneven)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._drop_open_window()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:
            self._drop_open_window()

    def _drop_open_window(self) -> None:
        """An epoch, or a fit, may have ended before the optimizer's step; Lightning begins with zero gradients."""
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            drop_unreduced_gradients(self.lightning_module)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output = super().training_step(*args, **kwargs)
        module = self.lightning_module
        assert module is not None
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None and module.automatic_optimization and self.world_size > 1:
            raise RuntimeError(
                f"training_step returned no loss on rank {self.global_rank}, but all {self.world_size} ranks have to"
                " run backward together; to leave a batch out, return a loss that is zero and connected to the graph,"
                " such as `loss * 0`"
            )
        return output
