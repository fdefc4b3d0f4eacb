"""Evening out the experts' load by a bias on the routers' choice, without an auxiliary loss.

What each expert got to do is counted in training forwards, summed over the world once an optimizer step, and moves the
bias of each expert up or down by a fixed amount: DeepSeek-V3, arXiv 2412.19437 section 2.1.2, and arXiv 2408.15664.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe_ep.callbacks.load import LoadCounter
from lightning_moe_ep.experts import ChoiceBias, biases_around, find_experts


class ExpertBiasCallback(L.Callback):
    """Moves the bias that routers choose experts by: `bias_i += update_rate * sign(mean load - load_i)`.

    For models whose routers have such a bias: DeepSeek-V3, GLM-4 MoE, ERNIE 4.5, LFM2 and others of transformers, and
    `MoELayer(choice_bias=True)`. It is found by what it is (see `bias_name`). With any strategy, or none.

    An expert's load is the number of (token, expert) pairs that the router gave it, padding included, on all ranks and
    in all micro-batches since the last optimizer step; the forwards of validation, and those that activation
    checkpointing repeats, do not count. All biases move at each optimizer step, the same on every rank. In manual
    optimization that is each `optimizer.step()` before which there was a forward since the last one: two optimizers
    that step one after the other move them once.

    Logs `expert_imbalance`, the largest load as a multiple of the mean, in the layer where it is largest; 1 is even.
    One all-reduce a step for all layers, and no host sync.
    """

    def __init__(self, update_rate: float = 1e-3, bias_name: str | None = None) -> None:
        """
        Args:
            update_rate: how far a bias moves in one step. It may be set in the course of a training; 0 only counts.
            bias_name: the attribute's name in the module that owns it. None: a floating buffer, or a parameter with
                `requires_grad=False`, of shape `[E]` or `[1, E]`, near the experts and with "bias" in its name.

        Raises:
            ValueError: update_rate is negative or not finite.
        """
        if not 0 <= update_rate < math.inf:
            raise ValueError(f"update_rate={update_rate} must be 0 or more, such as 0.001")
        self.update_rate = update_rate
        self.bias_name = bias_name
        self._counter: LoadCounter | None = None

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the biases.

        Raises:
            NoExpertsError: the model has no experts module.
            ValueError: there is no bias, more than one that may be it, or one that would not be saved or is not in
                fp32; on every rank.
        """
        self._close()
        biases = _find_biases(pl_module, self.bias_name)
        device = trainer.strategy.root_device
        self._counter = LoadCounter([bias.experts for bias in biases], device)
        sizes = self._counter.sizes
        self._biases = [bias.tensor for bias in biases]
        self._num_experts = torch.tensor(sizes, device=device)
        self._layer = torch.arange(len(sizes), device=device).repeat_interleave(
            self._num_experts, output_size=sum(sizes)
        )

    # Not by `module.training`: a model may be trained in eval mode.

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        assert self._counter is not None
        self._counter.counting = True

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        assert self._counter is not None
        self._counter.counting = False

    @override
    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        assert self._counter is not None
        if not self._counter.forwards:
            return
        loads, layer, num_experts = self._counter.loads(), self._layer, self._num_experts
        if trainer.world_size > 1:
            dist.all_reduce(loads)
        total = torch.zeros_like(num_experts).index_add_(0, layer, loads)
        most = torch.zeros_like(num_experts).scatter_reduce_(0, layer, loads, "amax")
        pl_module.log("expert_imbalance", (most * num_experts / total.clamp(min=1)).max())
        # In whole numbers, E times the mean less E times the load: its sign is exact.
        direction = (total.index_select(0, layer) - num_experts.index_select(0, layer) * loads).sign()
        steps = (self.update_rate * direction.float()).split([bias.numel() for bias in self._biases])
        for bias, step in zip(self._biases, steps, strict=True):
            _add(bias, step.view(bias.shape))
        self._counter.reset()

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._counter is not None:
            self._counter.close()
        self._counter = None


def _add(bias: Tensor, step: Tensor) -> None:
    if isinstance(bias, DTensor):
        # As every rank has the whole step, taking its own part of it exchanges nothing.
        whole = DTensor.from_local(step, bias.device_mesh, [Replicate()] * bias.device_mesh.ndim, run_check=False)
        bias, step = bias.to_local(), whole.redistribute(placements=bias.placements).to_local()
    bias.add_(step)


def _find_biases(model: nn.Module, bias_name: str | None) -> list[ChoiceBias]:
    experts = find_experts(model)
    found, without = [], []
    for module in experts:
        biases = biases_around(model, module, experts, key=bias_name)
        if len(biases) > 1:
            raise ValueError(
                f"{len(biases)} tensors may be the bias that the router of {module.name} chooses by:"
                f" {', '.join(bias.name for bias in biases)}; say which with ExpertBiasCallback(bias_name=...)"
            )
        found += biases
        without += [] if biases else [module]
    called = f"named {bias_name!r}" if bias_name else 'with "bias" in its name (but more than that)'
    wanted = (
        "a floating buffer, or a parameter with requires_grad=False, of one element for each of the"
        f" {{}} experts, {called}"
    )
    if not found:
        raise ValueError(
            f"no router of this model has a bias that it chooses experts by: there is none around {without[0].name}."
            f" It would be {wanted.format(without[0].num_experts)}. If it is called something else, give"
            " ExpertBiasCallback(bias_name=...); MoELayer has one with choice_bias=True; a model without one is"
            " balanced by an auxiliary loss (CausalLMModule(aux_loss='global'), load_balancing_loss)"
        )
    if without:
        rank_zero_warn(
            f"{len(without)} of {len(experts)} experts modules, {without[0].name} first, are not balanced: their"
            f" routers have no bias ({wanted.format(without[0].num_experts)})"
        )
    for bias in found:
        if not bias.is_saved:
            raise ValueError(
                f"the bias {bias.name} is a buffer that no checkpoint holds (persistent=False), so a resumed training"
                " would start from another; register it as persistent"
            )
        if bias.tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"the bias {bias.name} is in {bias.tensor.dtype}, in which small updates are lost; keep it in fp32"
                ' (MoEEPStrategy does, for one with "bias" in its name)'
            )
    return found
