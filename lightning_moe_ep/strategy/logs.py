"""What a run logs: values that are whole, means that are means, and how many parameters there are on a rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_moe_ep.experts import expert_parameters
from lightning_moe_ep.gradients import local_tensor
from lightning_moe_ep.trees import map_tensors


class LoggingStrategy(ModelParallelStrategy):
    """Makes `self.log` right for what is sharded, and for ranks with unlike batches."""

    def _log_whole_values(self, module: L.LightningModule) -> None:
        module.log = partial(_log, module)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce what is logged; lightning 2.6 would cut the mean of integers, which weigh a metric, to an integer."""
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)


def _log(module: L.LightningModule, name: str, value: Any, *args: Any, **options: Any) -> None:
    """`log` for which a part of a tensor is none: it would be reduced, or read on rank 0 alone, as if it were whole."""
    value = map_tensors(lambda tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, value)
    type(module).log(module, name, value, *args, **options)


def tell_parameters(trainer: L.Trainer, module: nn.Module) -> None:
    """Beside a model summary, say how many parameters a parallel model has in all, in experts, and on this rank."""
    if not any(isinstance(callback, ModelSummary) for callback in trainer.callbacks):
        return
    everything, experts = list(module.parameters()), expert_parameters(module)
    here = [sum(local_tensor(parameter).numel() for parameter in some) for some in (everything, experts)]
    rank_zero_info(
        f"{_count(everything)} parameters, {_count(experts)} of them in experts; on this rank"
        f" {get_human_readable_count(here[0])} and {get_human_readable_count(here[1])}"
    )


def log_kernels(trainer: L.Trainer, kernels: Sequence[str]) -> None:
    """Have the run's hyperparameters say which kernels were chosen, if any were."""
    for logger in trainer.loggers if kernels else ():
        logger.log_hyperparams({"kernels": list(kernels)})


def _count(parameters: Iterable[nn.Parameter]) -> str:
    return get_human_readable_count(sum(parameter.numel() for parameter in parameters))
