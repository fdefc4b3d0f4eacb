"""A LightningModule for Hugging Face causal language models.

Batches of token ids go in; what comes out of a step is the loss whose gradient, averaged over ranks and micro-batches
as data parallelism does, is that of the token-weighted mean over the world and the accumulation window. At cp > 1 the
batches are of whole sequences, the same on the ranks of a cp group, and each rank computes its slice.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from typing_extensions import override

from lightning_moe_ep.balance import load_balancing_loss
from lightning_moe_ep.checkpoint import build_pretrained, load_pretrained, pretrained_config
from lightning_moe_ep.context_parallel import IGNORED_LABEL, gather_sequences, problem_of_packing, shifted
from lightning_moe_ep.experts import find_experts, find_routers
from lightning_moe_ep.initialization import materialize
from lightning_moe_ep.kernels import has_fused_loss, summing
from lightning_moe_ep.optimizers import parameter_groups
from lightning_moe_ep.other_lightning import name_the_import

Freeze = Literal["none", "experts", "router"]
"""What is not trained: nothing, the routed experts, or what chooses among them."""

AuxLoss = Literal["local", "global"]


class CausalLMModule(L.LightningModule):
    """Trains a causal language model of transformers from a configuration, or fine-tunes one from a folder."""

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        pretrained: str | None = None,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 20,
        min_lr_ratio: float = 0.1,
        aux_loss: AuxLoss = "local",
        freeze: Freeze = "none",
    ) -> None:
        """
        Args:
            config: A new model's configuration: `model_type`, and what else that type's configuration takes.
            pretrained: A local Hugging Face folder, or a Trainer's checkpoint, to fine-tune from, instead of `config`.
            learning_rate: The highest learning rate, reached after the warm-up.
            weight_decay: AdamW's decay; norms and biases have none.
            betas: AdamW's decay rates of the two moments.
            warmup_steps: Optimizer steps over which the learning rate rises from 0.
            min_lr_ratio: The learning rate at the end of the cosine decay, as a share of the highest.
            aux_loss: Whose tokens the load-balancing loss is over, which is added with the model's
                `router_aux_loss_coef` and averaged over the micro-batches of an optimizer step. "local": the model's
                own, over the rank's (at cp > 1 the cp group's) micro-batch, if its config sets `output_router_logits`;
                they are averaged.
                "global": `load_balancing_loss` over the micro-batch of all ranks, whatever the config sets.
            freeze: What is not trained: "experts" (the routed experts; a shared expert is trained), "router", or
                "none" of the model.

        Raises:
            ValueError: not exactly one of config and pretrained, a config without a model_type, an aux_loss or a
                freeze that there is not, or "global" for a model that gives no router logits.
            FileNotFoundError: `pretrained` is not a folder.
        """
        super().__init__()
        name_the_import()
        if (config is None) == (pretrained is None):
            raise ValueError(
                "give exactly one of config (a new model) and pretrained (a local folder); on the command line,"
                " --model.config null takes away a config that a file gives"
            )
        if config is not None and "model_type" not in config:
            raise ValueError("config needs a model_type, such as qwen3_moe, mixtral or olmoe")
        if pretrained is not None and not Path(pretrained).exists():
            raise FileNotFoundError(
                f"pretrained={pretrained!r} is neither a folder nor a checkpoint; download the model's files first"
            )
        if aux_loss not in get_args(AuxLoss):
            raise ValueError(f"aux_loss={aux_loss!r} is not known; use one of {list(get_args(AuxLoss))}")
        if aux_loss == "global":
            _check_router_logits(
                pretrained_config(Path(pretrained))[0]
                if pretrained is not None
                else AutoConfig.for_model(**(config or {}))
            )
        if freeze not in get_args(Freeze):
            raise ValueError(f"freeze={freeze!r} is not known; use one of {list(get_args(Freeze))}")
        self.save_hyperparameters()
        self.model: PreTrainedModel | None = None
        self.val_loss = MeanMetric()
        self._window_loss: Tensor | float = 0.0
        self._told_of_packing = False

    @override
    def configure_model(self) -> None:
        if self.model is not None:
            return
        # A strategy that reads or makes the initial weights itself needs no more than the shapes.
        on_meta = self._trainer is not None and getattr(self.trainer.strategy, "materializes_meta", False)
        if self.hparams.pretrained is not None:
            self.model = build_pretrained(self.hparams.pretrained)
            if not on_meta:
                load_pretrained(self.model, self.hparams.pretrained, device=self.device)
                materialize(self.model, seed=0, device=self.device)  # buffers that are computed, not saved
        else:
            config = AutoConfig.for_model(**self.hparams.config)
            with torch.device("meta" if on_meta else self.device):
                self.model = AutoModelForCausalLM.from_config(config)
        self.model.train()
        self._freeze()
        self._check_vocabulary()

    def _freeze(self) -> None:
        assert self.model is not None
        frozen: Iterable[nn.Module] = ()
        if self.hparams.freeze == "experts":
            frozen = [found.module for found in find_experts(self.model)]
        elif self.hparams.freeze == "router":
            frozen = find_routers(self.model).values()
        for module in frozen:
            module.requires_grad_(False)

    def _check_vocabulary(self) -> None:
        # There is no trainer in `load_from_checkpoint`.
        data = getattr(self._trainer, "datamodule", None)
        folder = self.hparams.pretrained
        if folder and (Path(folder) / "tokenizer_config.json").exists() and getattr(data, "tokenizer", "") is None:
            raise ValueError(
                f"the data is tokenized as bytes, but {folder} has a tokenizer that the model was trained with; add"
                f" --data.tokenizer {folder}"
            )
        needed = getattr(data, "vocab_size", 0)
        assert self.model is not None
        available = self.model.config.get_text_config().vocab_size
        if needed > available:
            raise ValueError(
                f"the data has {needed} token ids, but the model's vocab_size is {available}; use the model's own"
                " tokenizer, or a config with a larger vocab_size"
            )

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Have the checkpoint stand for itself: the configuration in place of the folder, which may go or move."""
        hyper_parameters = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        if (folder := hyper_parameters.get("pretrained")) is not None and self.model is not None:
            config = json.loads(self.model.config.to_json_string(use_diff=False))
            config["_name_or_path"] = str(Path(folder).absolute())
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = {**hyper_parameters, "config": config, "pretrained": None}

    @override
    def forward(self, batch: Mapping[str, Tensor], **options: Any) -> Any:
        """The model's output for `input_ids [B, S]` and, where given, `attention_mask` and `position_ids`.

        Args:
            batch: holds these; at cp > 1, this rank's slice of them.
            options: further arguments of the model's forward.
        """
        assert self.model is not None
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids") if key in batch}
        return self.model(**inputs, use_cache=False, **options)

    @property
    def _cp_group(self) -> dist.ProcessGroup | None:
        """Who has slices of the same sequences; None at cp=1."""
        strategy: Any = None if self._trainer is None else self.trainer.strategy
        return strategy.meshes.cp_mesh.get_group() if getattr(strategy, "cp", 1) > 1 else None

    def _own_part(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """What this rank computes of a batch: at cp > 1 its slice. Labels, if any, are shifted."""
        batch = _never_empty(batch)
        if self._cp_group is not None:
            return self.trainer.strategy.shard_sequences(batch)
        return {**batch, "shift_labels": shifted(batch["labels"])} if "labels" in batch else batch

    def count_tokens(self, batch: Mapping[str, Tensor]) -> int:
        """How many tokens of the batch have a label to predict; asked before the batch goes to the device.

        Raises:
            ValueError: sequences are packed, but an `attention_mask` lets them see each other.
        """
        _check_packing(batch)
        self._warn_of_packing(batch)
        return int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())

    def _warn_of_packing(self, batch: Mapping[str, Tensor]) -> None:
        positions, mask = batch.get("position_ids"), batch.get("attention_mask")
        if self._told_of_packing or self.model is None or positions is None or mask is not None:
            return
        if self._cp_group is not None:  # masks are made from positions in every model that is not refused
            return
        if positions.ndim == 2 and bool((positions.diff(dim=-1) != 1).any()):
            self._told_of_packing = True
            if problem := problem_of_packing(self.model):
                rank_zero_warn(
                    "position_ids begin anew inside a row, but the sequences packed there influence each other in"
                    f" transformers' {self.model.config.model_type}: {problem}. Give each sequence a row of its own"
                )

    @override
    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """The batch's share of the token-weighted mean, and of the mean of the load-balancing losses.

        `MoEEPStrategy` puts the label tokens of the whole accumulation window, over the world, into the batch as
        `num_items_in_batch`; under another strategy the mean is over the batch's own tokens.

        The load-balancing loss is not a sum over tokens, so it is not weighed by them: each micro-batch has its own
        (with aux_loss="global" one for all ranks' tokens of it), and those of the window are averaged.
        """
        empty, group = not len(batch["input_ids"]), self._cp_group
        batch = self._own_part(batch)
        is_global = self.hparams.aux_loss == "global"
        assert self.model is not None
        targets = batch["shift_labels"]
        fused = summing(targets) if has_fused_loss(self.model) else {}
        output = self(batch, **({"output_router_logits": True} if is_global else {}), **fused)
        if fused:
            total, tokens = output.loss, (targets != IGNORED_LABEL).sum()
        else:
            total, tokens = summed_loss(output.logits, targets)
        accumulated = self.trainer.accumulate_grad_batches
        if "num_items_in_batch" in batch:
            # Averaging over the world, and Lightning's division by the window, cancel these factors.
            loss = total * (self.trainer.world_size * accumulated / max(1, batch["num_items_in_batch"]))
            share = accumulated / batch["num_micro_batches"]
        else:
            if group is not None:
                total = total * group.size()
                dist.all_reduce(tokens, group=group)
            loss, share = total / tokens.clamp(min=1), 1.0
        self._window_loss = self._window_loss + loss.detach() / accumulated
        model: Any = self.model
        aux_loss = getattr(output, "aux_loss", None)
        if is_global or (aux_loss is not None and group is not None):
            mask = torch.zeros_like(batch["input_ids"]) if empty else batch.get("attention_mask")
            aux_loss = load_balancing_loss(
                output.router_logits,
                model.num_experts,
                model.num_experts_per_tok,
                mask,
                group=None if is_global else group,  # transformers' own is over a slice
            )
        else:
            share *= not empty  # transformers saw tokens that the batch does not have
        return loss if aux_loss is None else loss + model.router_aux_loss_coef * share * aux_loss

    @override
    def on_train_start(self) -> None:
        self._window_loss = 0.0

    @override
    def on_train_epoch_start(self) -> None:
        self._window_loss = 0.0  # the last epoch may have ended before the optimizer's step

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.log("train_loss", self._window_loss, prog_bar=True, sync_dist=True)
        self._window_loss = 0.0

    @override
    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        self._update_loss(batch)
        self.log("val_loss", self.val_loss, prog_bar=True)

    @override
    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        self._update_loss(batch)
        self.log("test_loss", self.val_loss)

    def _update_loss(self, batch: Mapping[str, Tensor]) -> None:
        batch = self._own_part(batch)
        total, tokens = summed_loss(self(batch).logits, batch["shift_labels"])
        self.val_loss.update(total / tokens.clamp(min=1), weight=tokens)

    @override
    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """The most likely next token at each position, `[B, S]`."""
        rows, length = batch["input_ids"].shape
        tokens = self(self._own_part(batch)).logits.argmax(dim=-1)
        return gather_sequences(tokens, length=length, group=self._cp_group)[:rows]

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            raise ValueError("the cosine decay needs an end: give the Trainer max_steps or max_epochs")
        optimizer = torch.optim.AdamW(
            parameter_groups(self, weight_decay=self.hparams.weight_decay),
            lr=self.hparams.learning_rate,
            betas=tuple(self.hparams.betas),
            fused=True,  # torch's default is one parameter after the other, where they are sharded
        )
        warmup, lowest = self.hparams.warmup_steps, self.hparams.min_lr_ratio

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            progress = min(1.0, (step - warmup) / max(1, steps - warmup))
            return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _check_router_logits(config: PreTrainedConfig) -> None:
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    takes = "output_router_logits" in inspect.signature(model_class.forward).parameters
    if not takes or not hasattr(config.get_text_config(), "router_aux_loss_coef"):
        raise ValueError(
            "aux_loss='global' needs a model that gives router logits and has a coefficient for the loss, but the"
            f" forward of {model_class.__name__} takes no output_router_logits, or its config has no"
            " router_aux_loss_coef; leave aux_loss out (if its routers choose by a bias, ExpertBiasCallback balances"
            " them)"
        )


def _check_packing(batch: Mapping[str, Tensor]) -> None:
    """transformers tells packed sequences apart by their positions only where there is no mask."""
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    if positions is None or mask is None or positions.ndim != 2 or mask.ndim != 2:
        return
    inside = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    if bool((inside & (positions.diff(dim=-1) != 1)).any()):
        raise ValueError(
            "position_ids begin anew inside a row, but with an attention_mask [B, S] beside them the sequences packed"
            " there would see each other; leave attention_mask out of the batch"
        )


def _never_empty(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put one sequence without labels in place of an empty batch, which transformers' attention does not take.

    The rank then takes part in every collective, and its loss is a zero that is connected to the graph.
    """
    if batch["input_ids"].shape[0]:
        return batch
    ids = batch["input_ids"].new_zeros(1, max(2, batch["input_ids"].shape[1]))
    labels = torch.full_like(ids, IGNORED_LABEL)
    others = {key: value for key, value in batch.items() if key != "position_ids"}
    return {**others, "input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def summed_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy, in nats, of what each token is to predict, and how many have something to.

    Args:
        logits: `[B, S, V]`.
        targets: `[B, S]`, shifted already; `IGNORED_LABEL` where there is nothing to predict.

    Returns:
        Two tensors `[]`; the sum is connected to the graph also when no target counts.
    """
    flat = targets.flatten()
    total = F.cross_entropy(logits.flatten(0, 1).float(), flat, ignore_index=IGNORED_LABEL, reduction="sum")
    return total, (flat != IGNORED_LABEL).sum()
