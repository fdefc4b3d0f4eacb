"""A Hugging Face folder at the end of a fit, written from the model as it is, whatever its layout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_moe_ep.checkpoint.disk_form import Group, convert, plan_groups
from lightning_moe_ep.checkpoint.export import (
    MAX_SHARD_SIZE,
    check_free_place,
    dtype_of,
    new_folder,
    size_in_bytes,
    start_folder,
    target_dtypes,
    tokenizer_folder,
    total_bytes,
)
from lightning_moe_ep.checkpoint.pieces import describe_pieces, sources_of_pieces, to_plain
from lightning_moe_ep.checkpoint.rebuilt import check_no_adapters, check_weights, plain_of
from lightning_moe_ep.checkpoint.stored import Stored
from lightning_moe_ep.shards import gather
from lightning_moe_ep.transformers_models import outermost_models

Read = Callable[[str, int, int], Tensor]


class HuggingFaceExport(L.Callback):
    """Writes the model of transformers as a folder for `from_pretrained`, when a fit has ended.

    All ranks gather one parameter after the other (all experts of it) for rank 0, which writes.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: str | None = None,
        max_shard_size: str = MAX_SHARD_SIZE,
        tokenizer: str | Path | None = None,
        model: str | None = None,
    ) -> None:
        """
        Args:
            folder: Where to; it must be empty, or not there, when the fit starts.
            dtype: Of the weights, such as "bfloat16"; None: as they are.
            max_shard_size: How large a file may be, such as "500MB".
            tokenizer: A folder to copy tokenizer files from; None: that of the data or of the pretrained model.
            model: The model's path in the LightningModule, if that has several.

        Raises:
            ValueError: dtype or max_shard_size is none.
        """
        size_in_bytes(max_shard_size)
        self.folder = Path(folder).absolute()
        self.dtype = dtype_of(dtype)
        self.max_shard_size = max_shard_size
        self.tokenizer = Path(tokenizer) if tokenizer is not None else None
        self.path = model
        self._plain: PreTrainedModel | None = None

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See that it will work, on every rank, before anything is trained.

        Raises:
            ValueError: the module has no model of transformers, several, or one with adapters.
            RuntimeError: the folder is not empty, or the tokenizer's is not there.
        """
        live = self._model(pl_module)
        source = f"the {type(live).__name__} of {type(pl_module).__name__}"
        state = {name: value for name, value in live.state_dict().items() if isinstance(value, Tensor)}
        check_no_adapters(state, source=source)
        self._plain = plain_of(live)
        stored = {name: Stored(value.shape, value.dtype, _not_yet) for name, value in state.items()}
        check_weights(to_plain(describe_pieces(live), stored), dict(self._plain.state_dict()), source=source)
        _on_rank_0(trainer, self._check_folders)

    def _check_folders(self) -> None:
        check_free_place(self.folder)
        if self.tokenizer is not None and not self.tokenizer.is_dir():
            raise FileNotFoundError(f"tokenizer={str(self.tokenizer)!r} is not a folder")

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write.

        Raises:
            RuntimeError: it failed on rank 0; on every rank.
        """
        plain, live = self._plain, self._model(pl_module)
        assert plain is not None
        steps = _Steps(plain, live, self.dtype)
        tokenizer = self.tokenizer or tokenizer_folder(
            {
                "hyper_parameters": {"config": {"_name_or_path": live.config._name_or_path}, **pl_module.hparams},
                "datamodule_hyper_parameters": dict(getattr(getattr(trainer, "datamodule", None), "hparams", {})),
            }
        )

        def write() -> None:
            with new_folder(self.folder, nbytes=total_bytes(steps.groups)) as saving:
                files = start_folder(
                    saving,
                    plain,
                    steps.groups,
                    steps.dtypes,
                    max_shard_size=self.max_shard_size,
                    tokenizer=tokenizer,
                )
                for group, read in gathered:
                    for rows in convert(plain, group, read, max_bytes=sys.maxsize):
                        files.write(rows.name, rows.first, rows.values)

        gathered = iter(steps)
        # The other ranks gather, too; so does rank 0 when it has failed.
        _on_rank_0(trainer, write, meanwhile=lambda: [None for _ in gathered])

    def _model(self, module: nn.Module) -> PreTrainedModel:
        models = dict(outermost_models(module))
        if self.path is None and len(models) == 1:
            return next(iter(models.values()))
        if self.path is None or self.path not in models:
            raise ValueError(
                f"{type(module).__name__} has these models of transformers: {list(models)}; give the path of the one"
                f" to export as model, not {self.path!r}"
                if models
                else f"{type(module).__name__} has no model of transformers, which alone has a Hugging Face folder"
            )
        return models[self.path]


class _Steps:
    """The groups of tensors that are written together, each with what gives rank 0 its values.

    All ranks go through them; the tensors of a group are gathered as it comes, and let go when no later one needs them.
    """

    def __init__(self, plain: PreTrainedModel, live: PreTrainedModel, dtype: torch.dtype | None) -> None:
        self._state = {name: value for name, value in live.state_dict().items() if isinstance(value, Tensor)}
        self._held: dict[str, Tensor | None] = {}
        pieces = describe_pieces(live)
        self._stored: dict[str, Stored] = to_plain(
            pieces,
            {name: Stored(value.shape, value.dtype, partial(self._read, name)) for name, value in self._state.items()},
        )
        self.dtypes = target_dtypes(plain, {name: stored.dtype for name, stored in self._stored.items()}, dtype)
        order = {name: number for number, name in enumerate(self._state)}
        self.groups = plan_groups(plain, self.dtypes)
        """In their order on disk; they are gone through in the order of what they need."""
        made_of = sources_of_pieces(pieces)
        needs = [
            sorted({order[source] for name in group.sources for source in made_of.get(name, [name])})
            for group in self.groups
        ]
        self._needs = sorted(zip(needs, self.groups, strict=True), key=lambda entry: entry[0])

    def __iter__(self) -> Iterator[tuple[Group, Read]]:
        names = list(self._state)
        last = {number: step for step, (needed, _) in enumerate(self._needs) for number in needed}
        for step, (needed, group) in enumerate(self._needs):
            for number in needed:
                if names[number] not in self._held:
                    value = self._state[names[number]]
                    self._held[names[number]] = gather(value) if dist.is_initialized() else value.detach().cpu()
            yield group, lambda name, start, stop: self._stored[name].read(start, stop).to(self.dtypes[name])
            for number in needed:
                if last[number] == step:
                    del self._held[names[number]]

    def _read(self, name: str, start: int, stop: int) -> Tensor:
        value = self._held[name]
        assert value is not None
        return value[start:stop] if value.ndim else value


def _not_yet(start: int, stop: int) -> Tensor:
    raise AssertionError("nothing is gathered yet")


def _on_rank_0(trainer: L.Trainer, do: Callable[[], None], meanwhile: Callable[[], Any] = lambda: None) -> None:
    """Do something on rank 0, and then, on every rank, raise what it raised.

    Args:
        trainer: of this rank.
        do: what rank 0 does.
        meanwhile: what every rank does, rank 0 afterwards: collectives that `do` takes part in.
    """
    reason = ""
    if trainer.is_global_zero:
        try:
            do()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
    meanwhile()
    if reason := trainer.strategy.broadcast(reason):
        raise RuntimeError(f"the export to a Hugging Face folder failed on rank 0: {reason}")
