"""What the sentinel says of faults that are put into a run, and that it says nothing of right ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_ep import MoEEPStrategy, SentinelCallback, register_dispatcher
from lightning_moe_ep.dispatch import AllToAllDispatcher
from lightning_moe_ep.experts import expert_parameters
from lightning_moe_ep.gradients import clip_by_norm, gradient_norm, local_gradients, local_tensor
from tests.contract import contract
from tests.parity import Case, CaseModule, trainer
from tests.pool import RankPool

TWO = Case(steps=2, tokens=((16,), (7,)), clip=0.05)
BOTH = ("model.blocks.0.moe.experts", "model.blocks.1.moe.experts")


@register_dispatcher("loses_a_token")
class LosesAToken(AllToAllDispatcher):
    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Any) -> Tensor:
        index = top_k_index.clone()
        index[:1] = -1
        return super().__call__(hidden, index, top_k_weights, experts)


class Module(CaseModule):
    def configure_model(self) -> None:
        super().configure_model()
        self.offset = nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.zeros(2))
        self.normed = nn.BatchNorm1d(2)


class OwnNorm(Module):
    """Clips by the norm of what this rank holds."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        parameters = list(self.parameters())
        norm = torch.stack([grad.norm() for grad in local_gradients(parameters)]).norm()
        clip_by_norm(parameters, total=norm, max_norm=0.05)


class NormOfNothing(Module):
    """One rank has spoilt its norm."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        factor = 0.5 if dist.get_rank() == 0 else float("nan")
        for gradient in local_gradients(self.model.parameters()):
            gradient *= factor


class ReplacesBuffer(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen = self.seen + dist.get_rank()
        return super().training_step(batch, batch_idx)


class Nesterov(CaseModule):
    """Its optimizer works on the gradients in place."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9, nesterov=True, foreach=True)


class OwnGroups(Module):
    """Clips experts and all else by norms of their own, each the same on all ranks."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        experts = expert_parameters(self)
        others = [p for p in self.parameters() if all(p is not expert for expert in experts)]
        for parameters in (experts, others):
            parts = {"all": parameters}
            norm = gradient_norm(parts, norm_type=2.0, group=dist.group.WORLD, device=self.device)
            clip_by_norm(parameters, total=norm.total, max_norm=0.05)


class ByValue(Module):
    """Has whole gradients clipped together with sharded ones."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        gradients = local_gradients(self.parameters())
        assert max(float(gradient.abs().max()) for gradient in gradients) == pytest.approx(0.01)


class Plant(L.Callback):
    """Changes the module before the first step, differently on each rank."""

    def __init__(self, change: Callable[[Module], None]) -> None:
        self.change = change

    @torch.no_grad()
    def on_train_start(self, trainer: L.Trainer, pl_module: Module) -> None:
        self.change(pl_module)


def _fit(case: Case, sentinel: SentinelCallback, module: type[Module] = Module, change: Any = None) -> L.Trainer:
    L.seed_everything(7, verbose=False)
    fitting = trainer(
        MoEEPStrategy(ep=case.ep, replicate=case.replicate, **case.strategy),
        max_epochs=1,
        accumulate_grad_batches=len(case.tokens[0]),
        gradient_clip_val=case.clip,
        precision=case.precision,
        callbacks=[sentinel, *([Plant(change)] if change else [])],
    )
    fitting.fit(module(case))
    return fitting


def _buffer(module: Module) -> None:
    module.seen += dist.get_rank()
    module.normed.running_mean += dist.get_rank()  # each rank has its own


def _whole(module: Module) -> None:
    module.offset += 1e-7 * dist.get_rank()


def _replica(module: Module) -> None:
    local_tensor(module.model.head.weight).view(torch.int32)[0, 0] += dist.get_rank()  # the last bit


def _equal_pair(module: Module) -> None:
    for parameter in module.model.blocks[0].moe.experts.parameters():
        local = local_tensor(parameter)
        local[3] = local[1]


def _other_order(module: Module) -> None:
    """Two rows of the second replica are in each other's place."""
    head = local_tensor(module.model.head.weight)
    if dist.get_rank() == 1:
        head[:2] = head[:2].flip(0)


def _permuted_expert(module: Module) -> None:
    for parameter in module.model.blocks[0].moe.experts.parameters():
        local = local_tensor(parameter)
        local[3] = local[1].flip(0)


def _same_on_each_rank(module: Module) -> None:
    for parameter in expert_parameters(module):
        dist.broadcast(local_tensor(parameter), src=0)


PLANTED: dict[str, tuple[Case, type[Module], Any, list[str]]] = {
    "own norm": (TWO, OwnNorm, None, ["ranks clip by different norms: rank 0 by "]),
    "a buffer": (TWO, Module, _buffer, ["weights or buffers that should be replicated differ between ranks: seen;"]),
    "a whole weight": (TWO, Module, _whole, ["that should be replicated differ between ranks: offset;"]),
    "a replica": (
        Case(ep=1, replicate=2, steps=1),
        Module,
        _replica,
        ["weights that should be replicated differ between ranks: model.head.weight;"],
    ),
    "another order": (
        Case(ep=1, replicate=2, steps=1, frozen="head"),
        Module,
        _other_order,
        ["weights that should be replicated differ between ranks: model.head.weight;"],
    ),
    "a buffer that is replaced": (
        Case(steps=1),
        ReplacesBuffer,
        None,
        ["weights or buffers that should be replicated differ between ranks: seen;"],
    ),
    "a norm that is NaN": (TWO, NormOfNothing, None, ["ranks clip by different norms: rank 0 by 0.1, rank 1 by nan;"]),
    "a lost token": (
        Case(steps=1, tokens=((16,), (7,)), strategy={"dispatcher": "loses_a_token"}),
        Module,
        None,
        ["experts computed 42 (token, expert) pairs, but the routers chose 46"],
    ),
    # Frozen, so that the step leaves them alike.
    "equal experts": (
        Case(steps=1, frozen="experts"),
        Module,
        _equal_pair,
        [f"experts 1 and 3, 5 and 7 of {BOTH[0]} are equal"],
    ),
    "equal ranks": (
        Case(steps=1, frozen="experts"),
        Module,
        _same_on_each_rank,
        [
            f"experts are equal across ranks: each rank of an ep group has the same 4 expert(s) of {name}"
            for name in BOTH
        ],
    ),
}


def _planted() -> dict[str, str]:
    said = {}
    for name, (case, module, change, _) in PLANTED.items():
        try:
            _fit(case, SentinelCallback(), module, change)
            said[name] = "nothing"
        except RuntimeError as error:
            said[name] = str(error)
    return said


@contract(
    "Callbacks", "`SentinelCallback`", "works: checks norms, replicas, lost tokens and equal experts during a run"
)
def test_names_what_is_planted(ranks: RankPool) -> None:
    for said in ranks.run(_planted, world=2):
        for name, (_, _, _, expected) in PLANTED.items():
            first, *faults, way_out = said[name].split("\n")
            assert first == "SentinelCallback, after step 1:", said[name]
            assert len(faults) == len(expected), said[name]
            for fault, words in zip(faults, expected, strict=True):
                assert words in fault, said[name]
            assert way_out == "(SentinelCallback(on_fault='warn') goes on)"


class Checks(SentinelCallback):
    """Keeps the steps at which it checked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[int] = []

    def _check(self, trainer: L.Trainer) -> Any:
        self.steps.append(trainer.global_step)
        if dist.get_rank() == 0 and self._held.experts[0].ep > 1:
            assert self._chosen is not None
            assert all(load.any() for load in self._chosen.of_layers(self._chosen.loads()))
        return super()._check(trainer)


RIGHT = [
    Case(steps=5, tokens=((16, 5), (7, 0)), clip=0.05, strategy={"activation_checkpointing": "full"}),
    Case(steps=5, ep=1, clip=0.05),
    Case(steps=5, strategy={"dispatcher": "all_gather"}, precision="bf16-true", clip=0.05),
    Case(steps=5, strategy={"dispatcher": "three_chunks"}, tokens=((9,), (0,)), model={"choice_bias": True}),
    Case(steps=5, ep=1, replicate=2, precision="bf16-mixed"),
]


ALSO_RIGHT = [
    (Case(steps=3, clip=0.05), Nesterov, None),
    (Case(steps=3, clip=0.05), OwnGroups, None),
    (Case(steps=3, clip=0.01), ByValue, None),
    (Case(steps=3, frozen="experts"), Module, _permuted_expert),
]


def _right(cases: list[Case], others: Sequence[tuple[Case, type[Module], Any]] = ()) -> list[list[int]]:
    steps = []
    for case, module, change in [*((case, Module, None) for case in cases), *others]:
        checks = Checks(2)
        _fit(case, checks, module, change)
        steps.append(checks.steps)
    return steps


def test_says_nothing_of_right_runs(ranks: RankPool) -> None:
    """At the first step, and every second from there on."""
    expected = [[1, 3, 5]] * len(RIGHT) + [[1, 3]] * len(ALSO_RIGHT)
    assert ranks.run(_right, RIGHT, ALSO_RIGHT, world=2) == [expected] * 2


@pytest.mark.more
def test_says_nothing_of_right_runs_on_four_ranks(ranks: RankPool) -> None:
    cases = [
        Case(world=4, steps=3, clip=0.05),
        Case(world=4, steps=3, replicate=2, clip=0.05, strategy={"dispatcher": "all_to_all"}),
        Case(world=4, steps=3, model={"num_experts": 6}, tokens=((9,), (0,), (3,))),
    ]
    assert ranks.run(_right, cases, world=4) == [[[1, 3]] * 3] * 4


def _warned() -> int:
    with pytest.warns(UserWarning, match="ranks clip by different norms") if dist.get_rank() == 0 else nullcontext():
        return _fit(TWO, SentinelCallback(on_fault="warn"), OwnNorm).global_step


def test_a_warning_goes_on(ranks: RankPool) -> None:
    assert ranks.run(_warned, world=2) == [2, 2]


def test_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="every_n_steps=0 must be 1 or more"):
        SentinelCallback(0)
    with pytest.raises(ValueError, match=r"on_fault='stop' is not known; use one of \['raise', 'warn'\]"):
        SentinelCallback(on_fault="stop")
