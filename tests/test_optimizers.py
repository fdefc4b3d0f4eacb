"""Optimizers and schedulers against one process; groups of parameters; which optimizers are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Adafactor, AutoConfig, AutoModelForCausalLM

from lightning_moe_ep import MoEEPStrategy, parameter_groups
from tests import oracle
from tests.contract import contract
from tests.models import ADAM_EPS, build, loss_of
from tests.parity import Case, CaseModule, plain, trainer, worst
from tests.pool import RankPool

CASE = Case(steps=4, tokens=((16,), (7,)))

OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=3e-3, eps=ADAM_EPS, foreach=False),
    "AdamW, foreach": lambda groups: torch.optim.AdamW(groups, lr=3e-3, eps=ADAM_EPS, foreach=True),
    "AdamW, fused": lambda groups: torch.optim.AdamW(groups, lr=3e-3, eps=ADAM_EPS, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-1),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=1e-1, momentum=0.9, nesterov=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-3, eps=ADAM_EPS),
}

SCHEDULERS: dict[str, Callable[[Optimizer], dict[str, Any]]] = {
    "step": lambda o: {"scheduler": torch.optim.lr_scheduler.StepLR(o, 1, 0.5), "interval": "step"},
    "every second step": lambda o: {
        "scheduler": torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        "interval": "step",
        "frequency": 2,
    },
    "epoch": lambda o: {"scheduler": torch.optim.lr_scheduler.StepLR(o, 1, 0.5), "interval": "epoch"},
}


class Optimized(CaseModule):
    """Keeps the initial weights and the learning rates of its steps."""

    def __init__(self, optimizer: str, scheduler: str | None = None) -> None:
        super().__init__(CASE)
        self.kind, self.scheduler = optimizer, scheduler
        self.rates: list[float] = []

    def on_train_start(self) -> None:
        self.initial = plain(self.model, dict(self.model.named_parameters()))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.kind](parameter_groups(self, weight_decay=0.1))
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULERS[self.scheduler](optimizer)}


def _fit(module: L.LightningModule, **options: Any) -> L.Trainer:
    L.seed_everything(7, verbose=False)
    fitting = trainer(MoEEPStrategy(ep=2), **{"max_epochs": 1, **options})
    fitting.fit(module)
    return fitting


def _weights(kind: str, scheduler: str | None) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    module = Optimized(kind, scheduler)
    _fit(module)
    return module.initial, plain(module.model, dict(module.model.named_parameters())), module.rates


def _batches() -> list[list[dict[str, Tensor]]]:
    """`[step][rank]`."""
    return [[batch for of_rank in step for batch in of_rank] for step in CASE.batches()]


def _one_process(kind: str, initial: dict[str, Tensor], rates: list[float]) -> dict[str, Tensor]:
    model = oracle.reference_model(CASE.kind, CASE.model, initial)
    optimizer = OPTIMIZERS[kind](parameter_groups(model, weight_decay=0.1))
    for batches, rate in zip(_batches(), rates, strict=True):
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = rate
        sum(loss_of(model, batch) / len(batches) for batch in batches).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@contract("Optimizers", "`torch.optim.AdamW`", "works, plain, `foreach` and `fused`")
@contract(
    "Optimizers", "`torch.optim.SGD`", "works, with and without momentum; so do others that go element by element"
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_equal_those_of_one_process(ranks: RankPool, kind: str) -> None:
    initial, ours, rates = ranks.run(_weights, kind, None, world=2)[0]
    error, name = worst(ours, _one_process(kind, initial, rates))
    assert error < 1e-4, f"{name} is off by {error:.1e}"
    assert worst(ours, initial)[0] > 1e-2


# Schedulers.


def _rates() -> dict[str, list[float]]:
    found = {}
    for name in SCHEDULERS:
        module = Optimized("SGD", name)
        _fit(module, max_epochs=2)
        found[name] = module.rates
    return found


@contract("Optimizers", "learning rate schedulers", "work: intervals `step` and `epoch`, and `frequency`")
def test_schedulers(ranks: RankPool) -> None:
    right = {
        "step": [0.1 * 0.5**n for n in range(8)],
        "every second step": [0.1 * 0.5 ** (n // 2) for n in range(8)],
        "epoch": [0.1] * 4 + [0.05] * 4,
    }
    for rates in ranks.run(_rates, world=2):
        assert rates == {name: pytest.approx(values) for name, values in right.items()}


class Plateau(Optimized):
    """Logs a metric that falls on rank 0 and rises faster on rank 1."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.log("unlike", float(self.global_step * (-1 if dist.get_rank() == 0 else 2)))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS["SGD"](parameter_groups(self, weight_decay=0.1))
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        config = {"scheduler": scheduler, "monitor": "unlike", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def _plateau() -> tuple[list[float], float]:
    module = Plateau("SGD")
    fitted = _fit(module)
    fitted.fit_loop.max_epochs = 2
    fitted.fit(module)  # again: the metric is averaged once
    return module.rates, fitted.lr_scheduler_configs[0].scheduler.best


@contract("Optimizers", "`ReduceLROnPlateau`", "works; looks at the mean over ranks, also without `sync_dist`")
def test_a_plateau_is_one_on_all_ranks(ranks: RankPool) -> None:
    for rates, best in ranks.run(_plateau, world=2):
        # The mean of the ranks rises from the first step on.
        assert rates[:4] == pytest.approx([0.1, 0.1, 0.05, 0.025]) and len(rates) == 8
        assert best == pytest.approx(2.0)


# Groups.


class Norm2d(nn.Module):
    """A norm of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 3))


def test_norms_and_biases_are_not_decayed() -> None:
    model = build("own", num_experts=4)
    model.norm = Norm2d()
    model.relative_bias = nn.Parameter(torch.zeros(2, 3))
    model.head.bias.requires_grad_(False)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {group.pop("name"): group for group in parameter_groups(model, weight_decay=0.3)}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "dense": 0.3,
        "dense_no_decay": 0.0,
        "experts": 0.3,
        "own_no_decay": 0.0,
    }
    found = {name: {names[p] for p in group["params"]} for name, group in groups.items()}
    assert found["experts"] == {n for n in names.values() if ".experts." in n}
    norms = {"blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.1.norm.weight", "blocks.1.norm.bias"}
    assert found["dense_no_decay"] == {*norms, "norm.scale"}
    assert found["own_no_decay"] == {"relative_bias"}
    assert {"blocks.0.moe.router.weight", "head.weight"} <= found["dense"]


def test_stacked_biases_are_biases() -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16}
    config = AutoConfig.for_model(
        "gpt_oss",
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=8,
        **sizes,
    )
    model = AutoModelForCausalLM.from_config(config)
    names = {parameter: name.rpartition(".")[2] for name, parameter in model.named_parameters()}
    found = {g["name"]: {names[p] for p in g["params"]} for g in parameter_groups(model, weight_decay=0.3)}
    assert found["experts"] == {"gate_up_proj", "down_proj"}
    assert found["experts_no_decay"] == {"gate_up_proj_bias", "down_proj_bias"}
    assert parameter_groups(nn.Sequential(nn.Linear(2, 2)), weight_decay=0.1)[0]["name"] == "dense"  # no experts at all


def _names_of_groups(kind: str) -> dict[str, set[str]]:
    class Grouped(CaseModule):
        def configure_optimizers(self) -> None:
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            groups = parameter_groups(self, weight_decay=0.1)
            self.found = {group["name"]: {names[id(p)] for p in group["params"]} for group in groups}

    module = Grouped(Case(kind=kind))
    _fit(module)
    return module.found


@contract("Optimizers", "groups", "`parameter_groups`: experts apart, no weight decay on norms and biases")
@pytest.mark.parametrize("kind", ["qwen3_moe", "own_list_mixtral"])
def test_groups_are_those_of_the_plain_model(ranks: RankPool, kind: str) -> None:
    model = build(kind)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    right = {g["name"]: {names[id(p)] for p in g["params"]} for g in parameter_groups(model, weight_decay=0.1)}
    found = ranks.run(_names_of_groups, kind, world=2)[0]
    assert found.keys() == right.keys()
    if kind == "own_list_mixtral":  # of each expert there, of all of them here
        assert {n.replace(".0.", ".") for n in right["experts"] if ".experts.0." in n} == {
            n.replace(".0.", ".") for n in found["experts"]
        }
        found, right = ({k: v for k, v in names.items() if "experts" not in k} for names in (found, right))
    assert found == right


class Gain(Optimized):
    """Has a parameter that every rank holds whole."""

    groups = True

    def configure_model(self) -> None:
        super().configure_model()
        self.gain = nn.Parameter(torch.ones(4))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.gain.sum()

    def configure_optimizers(self) -> Any:
        if self.groups:
            return super().configure_optimizers()
        return torch.optim.AdamW(self.parameters(), fused=True)


def _beside_whole_parameters() -> tuple[list[dict[str, Tensor]], str]:
    found = []
    for kind in ("AdamW", "AdamW, foreach", "AdamW, fused"):
        module = Gain(kind)
        _fit(module)
        found.append({"gain": module.gain.detach(), **plain(module.model, dict(module.model.named_parameters()))})
    module.groups = False
    with pytest.raises(ValueError) as error:
        _fit(module)
    return found, str(error.value)


def test_foreach_and_fused_beside_parameters_that_are_not_sharded(ranks: RankPool) -> None:
    for (loop, foreach, fused), message in ranks.run(_beside_whole_parameters, world=2):
        assert worst(foreach, loop)[0] < 1e-5 and worst(fused, loop)[0] < 1e-5
        assert not torch.equal(loop["gain"], torch.ones(4))
        assert message.startswith("group 0 of AdamW has foreach or fused, which does not take parameters on the")
        assert "give it parameter_groups(self, weight_decay=...)" in message


# Two optimizers, one of them Muon.


def _of_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    (matrices,) = (g["params"] for g in parameter_groups(model, weight_decay=0.1) if g["name"] == "dense")
    known = {id(parameter) for parameter in matrices}
    return matrices, [parameter for parameter in model.parameters() if id(parameter) not in known]


def _both(model: nn.Module) -> list[Optimizer]:
    matrices, rest = _of_muon(model)
    return [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=1e-3, eps=ADAM_EPS),
    ]


class WithMuon(Optimized):
    def __init__(self) -> None:
        super().__init__("AdamW")
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[Optimizer]:
        return _both(self)


def _with_muon() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module = WithMuon()
    _fit(module)
    return module.initial, plain(module.model, dict(module.model.named_parameters()))


@contract(
    "Optimizers",
    "`torch.optim.Muon`",
    "works on dense matrices, beside another optimizer for the rest (manual optimization), to bf16 tolerance",
)
def test_muon_on_dense_matrices(ranks: RankPool) -> None:
    initial, ours = ranks.run(_with_muon, world=2)[0]
    right, noisy = _one_process_with_muon(initial, noise=0.0), _one_process_with_muon(initial, noise=2**-9)
    matrices, rest = [], []
    for name, weight in right.items():
        moved = (weight - initial[name]).norm()
        error, bf16 = (float((of[name] - weight).norm() / moved) for of in (ours, noisy))
        (matrices if name.endswith("weight") and weight.ndim == 2 else rest).append((error, bf16, name))
    assert all(error < 2e-3 for error, _, _ in rest)
    assert all(error < bf16 for error, bf16, _ in matrices)


def _one_process_with_muon(initial: dict[str, Tensor], noise: float) -> dict[str, Tensor]:
    """`noise`: of the gradients, as a share; Muon rounds them to bf16, 2^-9 of their size."""
    torch.manual_seed(0)
    model = oracle.reference_model(CASE.kind, CASE.model, initial)
    optimizers = _both(model)
    for batches in _batches():
        model.zero_grad()
        sum(loss_of(model, batch) / len(batches) for batch in batches).backward()
        for parameter in model.parameters():
            parameter.grad *= 1 + noise * torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


# What is refused.


class Refused(CaseModule):
    def __init__(self, make: Callable[[Any], Optimizer]) -> None:
        super().__init__(Case())
        self.make = make

    def configure_optimizers(self) -> Optimizer:
        return self.make(self.parameters())


def _refused() -> list[str]:
    messages = []
    for make in (torch.optim.LBFGS, torch.optim.Adafactor, Adafactor):
        with pytest.raises(NotImplementedError) as error:
            _fit(Refused(make))
        messages.append(str(error.value))
    return messages


@contract("Optimizers", "`torch.optim.LBFGS`", "refused: use AdamW or another that goes element by element")
@contract(
    "Optimizers", "Adafactor, torch's and transformers'", "refused: use AdamW or another that goes element by element"
)
def test_optimizers_that_cannot_work_are_refused(ranks: RankPool) -> None:
    for messages in ranks.run(_refused, world=2):
        for message, (name, why) in zip(
            messages,
            [
                ("torch.optim.lbfgs.LBFGS", "inner products of all parameters as one vector"),
                ("torch.optim.Adafactor", "means over the rows and columns of whole matrices"),
                ("transformers.optimization.Adafactor", "means over the rows and columns of whole matrices"),
            ],
            strict=True,
        ):
            assert message.startswith(f"the optimizer {name} does not work on sharded parameters: ") and why in message
            assert "torch.optim.AdamW(parameter_groups(self, weight_decay=0.1), fused=True)" in message
