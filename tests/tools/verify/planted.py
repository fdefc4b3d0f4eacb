"""Strategies with one fault each, as users have met them, and the run that they are planted in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from lightning_moe_ep import ExpertGradientCallback, MoEEPStrategy
from lightning_moe_ep.experts import expert_parameters, find_experts, find_routers
from lightning_moe_ep.gradients import clip_by_norm, local_tensor, scale_gradients
from lightning_moe_ep.shards import cut
from tests.models import HIDDEN, OwnModel


class Samples(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, HIDDEN, generator=generator), torch.randn(6, HIDDEN, generator=generator)


class Regression(L.LightningModule):
    """Two blocks of `OwnModel`, alike, with a shared expert; some dropout, which is to be taken out."""

    def __init__(
        self, dropout: float = 0.5, optimizer: str = "adamw", noise: float = 0.0, detached: bool = False
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.optimizer = optimizer
        self.noise = noise
        self.detached = detached

    def configure_model(self) -> None:
        self.model = OwnModel(num_experts=12, intermediate_size=24)
        for router in find_routers(self.model).values() if self.detached else ():
            router.register_forward_hook(lambda _, args, output: (output[0], output[1].detach(), output[2]))
        self.entry = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(self.dropout))

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = (part.flatten(0, 1) for part in batch)
        return (self.model(self.entry(x)) - y).pow(2).mean() * 10 + self.noise * torch.rand(())

    def configure_optimizers(self) -> Any:
        optimizer = {
            "adamw": lambda: torch.optim.AdamW(self.parameters(), lr=1e-3),
            "sgd": lambda: torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9),
            "muon": lambda: torch.optim.Muon([p for p in self.parameters() if p.ndim == 2], lr=1e-2),
        }[self.optimizer]()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class _Scaled(ExpertGradientCallback):
    """Something is done to gradients after all that has to be."""

    def __init__(self, then: Callable[[ExpertGradientCallback, nn.Module], None]) -> None:
        super().__init__()
        self._then = then

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_after_backward(trainer, pl_module)
        self._then(self, pl_module)


class _WithGradients(MoEEPStrategy):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gradients = _Scaled(self.then)

    @staticmethod
    def then(callback: ExpertGradientCallback, module: nn.Module) -> None:
        raise NotImplementedError


class NotAveraged(MoEEPStrategy):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

        class Callback(ExpertGradientCallback):
            def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
                super().on_fit_start(trainer, pl_module)
                self._ep = 1

        self.gradients = Callback()


class AveragedTwice(_WithGradients):
    @staticmethod
    def then(callback: ExpertGradientCallback, module: nn.Module) -> None:
        scale_gradients(expert_parameters(module), 1 / callback._ep)


class SummedOverEfsdp(_WithGradients):
    @staticmethod
    def then(callback: ExpertGradientCallback, module: nn.Module) -> None:
        scale_gradients(expert_parameters(module), float(dist.get_world_size() // callback._ep))


class SharedExpertEpTimes(_WithGradients):
    @staticmethod
    def then(callback: ExpertGradientCallback, module: nn.Module) -> None:
        shared = [parameter for name, parameter in module.named_parameters() if "shared_expert" in name]
        scale_gradients(shared, float(callback._ep))


class OneElement(_WithGradients):
    """One number of one gradient, on one rank."""

    @staticmethod
    def then(callback: ExpertGradientCallback, module: nn.Module) -> None:
        if dist.get_rank() == 1:
            gradient = module.get_parameter("model.head.weight").grad
            assert gradient is not None
            local_tensor(gradient)[0, 3] += 1e-3


class ReplicasApart(_WithGradients):
    """The dense gradients are not averaged over all ranks that hold them."""

    @staticmethod
    def then(callback: ExpertGradientCallback, module: nn.Module) -> None:
        scale_gradients([module.get_parameter("model.head.weight")], 1.0 + dist.get_rank())


class _Patched(MoEEPStrategy):
    """Something is done to the modules."""

    def parallelize(self, model: nn.Module, **options: Any) -> None:
        super().parallelize(model, **options)
        self.patch(model)

    def patch(self, model: nn.Module) -> None:
        raise NotImplementedError


class RouterDetached(_Patched):
    def patch(self, model: nn.Module) -> None:
        for router in find_routers(model).values():
            router.forward = _outside_of_the_graph(router)


def _outside_of_the_graph(router: nn.Module) -> Callable[..., Any]:
    original = router.forward

    def forward(*args: Any) -> Any:
        parameters = dict(router._parameters)
        router._parameters.update({name: p.detach() for name, p in parameters.items()})  # type: ignore[misc]
        try:
            return original(*args)
        finally:
            router._parameters.update(parameters)

    return forward


class _Detached(_Patched):
    argument: int

    def modules_of(self, model: nn.Module) -> list[nn.Module]:
        return [found.module for found in find_experts(model)]

    def patch(self, model: nn.Module) -> None:
        for module in self.modules_of(model):
            original = module.forward
            module.forward = lambda *args, original=original: original(
                *(arg.detach() if number == self.argument else arg for number, arg in enumerate(args))
            )


class RoutingWeightsDetached(_Detached):
    argument = 2


class RouterInputDetached(_Detached):
    argument = 0

    def modules_of(self, model: nn.Module) -> list[nn.Module]:
        return list(find_routers(model).values())


class TokensDropped(_Patched):
    """One rank leaves the experts' output out for its last token."""

    def patch(self, model: nn.Module) -> None:
        for found in find_experts(model):
            original = found.module.forward
            keep = torch.ones(12, 1)
            keep[-1] = dist.get_rank() != 1
            found.module.forward = lambda *args, original=original, keep=keep: original(*args) * keep


class OneTokenElsewhere(_Patched):
    """As if one token of a rank had been at a tie."""

    def patch(self, model: nn.Module) -> None:
        for router in find_routers(model).values():
            original = router.forward

            def forward(*args: Any, original: Callable[..., Any] = original) -> Any:
                logits, weights, index = original(*args)
                index = index.clone()
                index[3] = (index[3] + 1) % 12
                return (logits, weights, index) if dist.get_rank() == 1 else original(*args)

            router.forward = forward


class GroupNorm(MoEEPStrategy):
    """Each ep group clips by its own norm."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        strategy = self

        class Callback(ExpertGradientCallback):
            def clip(self, optimizer: Any, max_norm: float) -> None:
                parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                square = sum(local_tensor(p.grad).square().sum() for p in parameters)
                dist.all_reduce(square, group=strategy.meshes.ep_mesh.get_group())
                clip_by_norm(parameters, total=square.sqrt(), max_norm=max_norm)

        self.gradients = Callback()


class _OtherWeights(MoEEPStrategy):
    """Experts get other initial weights."""

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        module = trainer.lightning_module
        for parameter in expert_parameters(module):
            whole = parameter.full_tensor().clone() if isinstance(parameter, DTensor) else parameter.detach().clone()
            with torch.no_grad():
                self.change(whole)
                parameter.copy_(cut(whole, parameter) if isinstance(parameter, DTensor) else whole)

    def change(self, whole: Tensor) -> None:
        raise NotImplementedError


class EqualExperts(_OtherWeights):
    def change(self, whole: Tensor) -> None:
        whole[4] = whole[1]


class EqualAcrossRanks(_OtherWeights):
    def change(self, whole: Tensor) -> None:
        first, *others = whole.chunk(self.layout.ep)
        for other in others:
            other.copy_(first)


class SameBatch(MoEEPStrategy):
    """The sampler knows data parallel ranks, and takes an ep group for one."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size // self.layout.ep, "rank": self.global_rank // self.layout.ep}


class MomentsLost(MoEEPStrategy):
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        for optimizer in self.optimizers:
            optimizer.state.clear()
        return checkpoint


class StepTooLarge(MoEEPStrategy):
    """The optimizer of the ranks has another rate than what the module configured."""

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        for config in self.lr_scheduler_configs:
            config.scheduler.base_lrs = [2 * rate for rate in config.scheduler.base_lrs]
        for group in self.optimizers[0].param_groups:
            group["lr"] *= 2


PLANTED: dict[type[MoEEPStrategy], tuple[str, str]] = {
    NotAveraged: ("experts-not-averaged", "not averaged over ep (they are 2.00 = ep times too large)"),
    AveragedTwice: ("experts-averaged-twice", "averaged over ep twice"),
    SharedExpertEpTimes: ("shared-expert-counted-ep-times", "the shared expert is counted ep times"),
    RouterDetached: ("router-detached", "the router is detached"),
    RoutingWeightsDetached: ("routing-weights-detached", "the routing weights are detached"),
    GroupNorm: ("norms-differ", "ranks clip by different norms: ranks 0 and 1 by "),
    EqualExperts: ("equal-experts", "experts 1 and 4 of model.blocks.0.moe.experts are equal"),
    SameBatch: ("same-batch", "ranks 0 and 1 have the same batch"),
    MomentsLost: ("moments-lost-at-resume", "the optimizer's state is lost at resume"),
    EqualAcrossRanks: ("experts-equal-across-ranks", "each rank of an ep group has the same"),
    RouterInputDetached: ("router-input-detached", "the router's input is detached"),
    OneElement: ("gradient-wrong", "worst is model.head.weight, off by "),
    StepTooLarge: ("step-wrong", "weights of "),
}
"""By the strategy the fault's name, and some of its words."""
