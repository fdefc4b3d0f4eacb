"""What optimizers need to know of a parallel model: which parameters belong together, and which optimizers cannot work.

A model goes into `parameter_groups`, and groups for any optimizer of torch come out. A strategy asks the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_moe_ep.experts import NoExpertsError, find_experts

REFUSED = {
    "LBFGS": "it takes inner products of all parameters as one vector, and they are on more than one mesh",
    "Adafactor": "it keeps means over the rows and columns of whole matrices, and each rank has a part of them only",
}
"""Optimizers that fail on sharded parameters or go wrong without a word, by the name of their class; and why."""


def parameter_groups(module: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters as groups for an optimizer: one for each mesh, no weight decay on norms and biases.

    `foreach` and `fused` need all parameters of a group to be sharded alike: those that sit on the LightningModule
    itself, which every rank holds whole, have groups of their own.

    What has less than two dimensions is not decayed either. The experts' dimension does not count: stacked biases
    `[E, H]` are biases. The groups of the plain model, and of the model at any layout, are the same.

    Args:
        module: the LightningModule or any model, plain or parallel.
        weight_decay: of the others.

    Returns:
        Those that are not empty of `dense`, `experts` and `own` (on the module itself), and of each with `_no_decay`
        after it. They have `name` (which LearningRateMonitor shows), `params` and `weight_decay`; set others, such as
        `lr`, as you like.
    """
    dims = _dims_of_experts(module)
    groups: dict[str, list[nn.Parameter]] = {
        f"{part}{decay}": [] for part in ("dense", "experts", "own") for decay in ("", "_no_decay")
    }
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        owner, _, key = name.rpartition(".")
        is_plain = (
            dims.get(parameter, parameter.ndim) < 2
            or key.endswith("bias")
            or "norm" in type(module.get_submodule(owner)).__name__.lower()
        )
        part = "experts" if parameter in dims else "dense" if owner else "own"
        groups[f"{part}_no_decay" if is_plain else part].append(parameter)
    return [
        {"name": name, "params": parameters, "weight_decay": 0.0 if name.endswith("no_decay") else weight_decay}
        for name, parameters in groups.items()
        if parameters
    ]


def _dims_of_experts(module: nn.Module) -> dict[nn.Parameter, int]:
    """How many dimensions one expert's part of each expert parameter has."""
    try:
        experts = find_experts(module)
    except NoExpertsError:
        return {}
    dims = {}
    for found in experts:
        for name, parameter in found.module.named_parameters():
            if name in found.adapter.parameters:
                dims[parameter] = parameter.ndim - (parameter.shape[0] == found.num_experts)
            elif name.partition(".")[2] in found.adapter.parameters:  # of one member of a list
                dims[parameter] = parameter.ndim
    return dims


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """See that none of the optimizers is one that cannot work.

    Raises:
        NotImplementedError: one is; says which, and why.
        ValueError: one has foreach or fused for parameters that are sharded and such that are not, together.
    """
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            kinds = {isinstance(parameter, DTensor) for parameter in group["params"]}
            if len(kinds) > 1 and (group.get("foreach") or group.get("fused")):
                raise ValueError(
                    f"group {number} of {type(optimizer).__name__} has foreach or fused, which does not take parameters"
                    " on the LightningModule itself together with sharded ones; give it parameter_groups(self,"
                    " weight_decay=...), or leave foreach and fused out"
                )
        for name in {base.__name__ for base in type(optimizer).__mro__} & REFUSED.keys():
            raise NotImplementedError(
                f"the optimizer {type(optimizer).__module__}.{type(optimizer).__name__} does not work on sharded"
                f" parameters: {REFUSED[name]}. Use one that treats each element by itself, such as"
                " torch.optim.AdamW(parameter_groups(self, weight_decay=0.1), fused=True)"
            )


def check_finetuning(trainer: L.Trainer) -> None:
    """See that no callback looks for parameters by their values.

    Raises:
        NotImplementedError: one does, as Lightning's BackboneFinetuning.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, BaseFinetuning):
            raise NotImplementedError(
                f"the callback {type(callback).__name__} compares parameters with each other by value, which sharded"
                " ones on more than one mesh do not allow; call requires_grad_ in configure_model and again in"
                " on_train_epoch_start, and give the optimizer all parameters"
            )


def agree_on_metrics(module: L.LightningModule, device: torch.device) -> None:
    """Let schedulers that look at a metric (ReduceLROnPlateau) see the mean over all ranks.

    Else ranks that logged it without `sync_dist` would go on with unlike learning rates for parts of one weight.
    """
    if "lr_scheduler_step" in vars(module):
        return
    step = module.lr_scheduler_step

    @wraps(step)
    def step_together(scheduler: Any, metric: Any) -> None:
        if metric is not None:
            metric = torch.as_tensor(metric, dtype=torch.float32, device=device).detach() / dist.get_world_size()
            dist.all_reduce(metric)
        step(scheduler, metric)

    module.lr_scheduler_step = step_together
