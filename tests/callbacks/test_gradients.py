"""The gradient callback among others, in manual optimization, and what it logs and refuses."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm as lightning_grad_norm
from torch import Tensor

from lightning_moe_ep import ExpertGradientCallback, MoEEPStrategy, grad_norm
from lightning_moe_ep.experts import expert_parameters
from tests import oracle
from tests.contract import contract
from tests.models import loss_of
from tests.parity import Case, CaseModule, trainer, whole, worst
from tests.pool import RankPool
from tests.test_freezing import Reduced

CASE = Case(world=4, ep=2, tokens=((16,), (7,), (9,), (0,)))
TWO_BACKWARDS = Case(world=4, ep=2, tokens=((16, 5), (7, 8), (9, 0), (0, 3)))
TWO_MICRO_BATCHES = Case(tokens=((16, 5), (7, 8)))
CLIP = 0.05


def _answer(case: Case, initial: dict[str, Tensor], **options: Any) -> oracle.Answer:
    return oracle.answer(case.kind, case.model, initial, case.batches(), **options)


def _fit(module: L.LightningModule, *callbacks: L.Callback, ep: int = 2, **options: Any) -> L.Trainer:
    L.seed_everything(7, verbose=False)
    fitting = trainer(MoEEPStrategy(ep=ep), callbacks=list(callbacks), max_epochs=1, **options)
    fitting.fit(module)
    return fitting


def _gradients(module: CaseModule) -> dict[str, Tensor]:
    return whole({name: p.grad for name, p in module.model.named_parameters()})


class Initial(L.Callback):
    """Keeps the initial weights."""

    def on_train_start(self, trainer: L.Trainer, pl_module: CaseModule) -> None:
        self.weights = whole(dict(pl_module.model.named_parameters()))


# Where it stands.


class After(L.Callback):
    """Keeps the gradients that a callback sees right after backward."""

    def on_after_backward(self, trainer: L.Trainer, pl_module: CaseModule) -> None:
        self.gradients = _gradients(pl_module)


def _order(gives_one: bool) -> tuple[list[str], float, dict[str, Tensor], dict[str, Tensor]]:
    initial, after = Initial(), After()
    given = [ExpertGradientCallback(norm_type=3.0)] if gives_one else []
    fitted = _fit(CaseModule(CASE), initial, after, *given)
    fitted.fit_loop.max_epochs = 2  # fitting again adds no second one
    fitted.fit(fitted.lightning_module)
    names = [type(callback).__name__ for callback in fitted.callbacks]
    return names, fitted.callbacks[0].norm_type, initial.weights, after.gradients


@pytest.mark.parametrize("gives_one", [True, False])
def test_stands_first_and_once(ranks: RankPool, gives_one: bool) -> None:
    for names, norm_type, _, _ in ranks.run(_order, gives_one, world=4):
        assert names == ["ExpertGradientCallback", "Initial", "After"]
        assert norm_type == (3.0 if gives_one else 2.0)


def _seen_by_another() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    initial, after = Initial(), After()
    _fit(CaseModule(CASE), after, initial, ExpertGradientCallback())
    return initial.weights, after.gradients


def test_other_callbacks_see_final_gradients(ranks: RankPool) -> None:
    initial, seen = ranks.run(_seen_by_another, world=4)[0]
    error, name = worst(seen, _answer(CASE, initial).gradients[0])
    assert error < 1e-5, name


def _two() -> str:
    with pytest.raises(ValueError) as error:
        _fit(CaseModule(CASE), ExpertGradientCallback(), ExpertGradientCallback())
    return str(error.value)


def test_two_are_refused(ranks: RankPool) -> None:
    message = "the Trainer has more than one ExpertGradientCallback; gradients would be scaled twice"
    assert ranks.run(_two, world=2) == [message] * 2


@pytest.mark.parametrize("norm_type", [0.0, -1.0])
def test_refuses_a_norm_type_that_is_none(norm_type: float) -> None:
    with pytest.raises(ValueError, match=f"norm_type={norm_type} must be positive, or inf"):
        ExpertGradientCallback(norm_type=norm_type)


# Manual optimization.


class Manual(CaseModule):
    """Two optimizers, the experts' and the rest's; clips by itself; keeps what it sees."""

    def __init__(self, case: Case, steps_together: bool) -> None:
        super().__init__(case)
        self.automatic_optimization = False
        self.steps_together = steps_together
        self.gradients: list[dict[str, Tensor]] = []
        self.logged: dict[str, float] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        self.manual_backward(loss_of(self.model, batch))
        self.gradients.append(_gradients(self))
        if (batch_idx + 1) % len(self.case.tokens[0]):
            return
        together = [optimizers] if self.steps_together else [[optimizer] for optimizer in optimizers]
        for group in together:
            for optimizer in group:
                self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
            for optimizer in group:
                optimizer.step()
                optimizer.zero_grad()

    def on_train_batch_end(self, *args: Any) -> None:
        self.logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        experts = expert_parameters(self)
        known = {id(parameter) for parameter in experts}
        rest = [parameter for parameter in self.parameters() if id(parameter) not in known]
        return [torch.optim.SGD(experts, lr=1.0), torch.optim.SGD(rest, lr=1.0)]


def _manual(case: Case, steps_together: bool) -> tuple[dict[str, Tensor], list, dict[str, Tensor], dict[str, float]]:
    initial, module = Initial(), Manual(case, steps_together)
    _fit(module, initial)
    return initial.weights, module.gradients, whole(dict(module.model.named_parameters())), module.logged


def _is_expert(name: str) -> bool:
    return ".experts." in name


@pytest.mark.parametrize("steps_together", [True, False])
@pytest.mark.parametrize("case", [CASE, TWO_BACKWARDS], ids=["one backward", "two backwards"])
def test_manual_optimization(ranks: RankPool, case: Case, steps_together: bool) -> None:
    initial, seen, weights, logged = ranks.run(_manual, case, steps_together, world=4)[0]
    backwards = len(case.tokens[0])
    # Each backward adds the gradient of its own batch; the oracle's is the mean over them.
    right = {name: backwards * g for name, g in _answer(case, initial).gradients[0].items()}
    assert len(seen) == backwards
    error, name = worst(seen[-1], right)
    assert error < 1e-5, name
    for of_experts in (True, False):
        part = {name: gradient for name, gradient in right.items() if _is_expert(name) == of_experts}
        norm = oracle.norm_of(part, 2.0)
        assert norm > CLIP, "nothing would be clipped"
        for name, gradient in part.items():
            step = initial[name] - weights[name]
            torch.testing.assert_close(step, gradient * CLIP / norm, rtol=1e-4, atol=1e-6)
    # The last optimizer's, before it was clipped.
    dense = oracle.norm_of({name: gradient for name, gradient in right.items() if not _is_expert(name)}, 2.0)
    assert logged["grad_norm/dense"] == pytest.approx(dense, rel=1e-5)
    assert logged["grad_norm"] == pytest.approx(dense, rel=1e-5)
    assert logged["grad_norm/experts"] == 0.0


# Clipping and the log.


class SGD(CaseModule):
    """A step of 1 times the gradient: what clipping left of it shows in the weights."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _stepped(
    options: dict[str, Any], norm_type: float
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """The initial weights, by how much one step changed them, and the log."""
    initial, module = Initial(), SGD(CASE)
    fitted = _fit(module, initial, ExpertGradientCallback(norm_type=norm_type), **options)
    weights = whole(dict(module.model.named_parameters()))
    logged = {name: float(value) for name, value in fitted.callback_metrics.items()}
    return initial.weights, {name: initial.weights[name] - weights[name] for name in weights}, logged


@contract("Gradients", "`gradient_clip_algorithm='value'`")
def test_clipping_by_value(ranks: RankPool) -> None:
    options = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    initial, step, _ = ranks.run(_stepped, options, 2.0, world=4)[0]
    right = _answer(CASE, initial).gradients[0]
    assert max(float(gradient.abs().max()) for gradient in right.values()) > 1e-3
    for name, gradient in right.items():
        torch.testing.assert_close(step[name], gradient.clamp(-1e-3, 1e-3), rtol=1e-4, atol=1e-6)


@contract(
    "Gradients",
    "`gradient_clip_val`",
    "works, by the norm of all ranks' gradients together, which is logged as `grad_norm` (before clipping)",
)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": CLIP},
        {"gradient_clip_val": CLIP, "gradient_clip_algorithm": "norm"},
        {"gradient_clip_val": CLIP, "gradient_clip_algorithm": "value"},
    ],
    ids=lambda options: options.get("gradient_clip_algorithm", f"clip {options.get('gradient_clip_val')}"),
)
def test_the_log_has_the_norms_before_clipping(ranks: RankPool, options: dict[str, Any], norm_type: float) -> None:
    results = ranks.run(_stepped, options, norm_type, world=4)
    initial, _, logged = results[0]
    assert all(of_rank[2] == logged for of_rank in results)
    right = _answer(CASE, initial).gradients[0]
    parts = {
        "grad_norm/dense": {name: gradient for name, gradient in right.items() if not _is_expert(name)},
        "grad_norm/experts": {name: gradient for name, gradient in right.items() if _is_expert(name)},
        "grad_norm": right,
    }
    assert logged.keys() == parts.keys()
    for name, gradients in parts.items():
        assert logged[name] == pytest.approx(oracle.norm_of(gradients, norm_type), rel=1e-5), name
    if norm_type == 2.0:
        of_parts = logged["grad_norm/dense"] ** 2 + logged["grad_norm/experts"] ** 2
        assert logged["grad_norm"] ** 2 == pytest.approx(of_parts, rel=1e-5)


def _silent() -> list[str]:
    callback = ExpertGradientCallback(log_grad_norm=False)
    return list(_fit(CaseModule(CASE), callback, gradient_clip_val=CLIP).callback_metrics)


def test_log_can_be_left_out(ranks: RankPool) -> None:
    assert ranks.run(_silent, world=4) == [[]] * 4


class OwnClipping(SGD):
    """Halves what the Trainer asks for."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        assert gradient_clip_val == CLIP
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
        for parameter in self.parameters():
            parameter.grad /= 2


class TorchClipping(SGD):
    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP)


def _own_clipping() -> tuple[dict[str, Tensor], dict[str, Tensor], float, str]:
    initial, module = Initial(), OwnClipping(TWO_MICRO_BATCHES)
    fitted = _fit(module, initial, gradient_clip_val=CLIP, accumulate_grad_batches=2)
    weights = whole(dict(module.model.named_parameters()))
    step = {name: initial.weights[name] - weights[name] for name in weights}
    with pytest.raises(RuntimeError) as error:
        _fit(TorchClipping(CASE), gradient_clip_val=CLIP)
    metrics = fitted.callback_metrics
    return initial.weights, step, float(metrics["grad_norm"]), "".join(error.value.__notes__)


@contract("Gradients", "`configure_gradient_clipping` overridden", "works; it calls `self.clip_gradients`")
@contract(
    "Gradients",
    "`torch.nn.utils.clip_grad_norm_` by hand",
    "refused: experts are on a mesh of their own; call `self.clip_gradients`",
)
@contract("Gradients", "`accumulate_grad_batches`", "works; gradients are reduced once a step")
def test_a_clipping_of_the_users_own(ranks: RankPool) -> None:
    for initial, step, norm, note in ranks.run(_own_clipping, world=2):
        right = _answer(TWO_MICRO_BATCHES, initial).gradients[0]
        assert norm == pytest.approx(oracle.norm_of(right, 2.0), rel=1e-5) and norm > CLIP
        for name, gradient in right.items():
            torch.testing.assert_close(step[name], gradient * CLIP / norm / 2, rtol=1e-4, atol=1e-6)
        assert "let it call self.clip_gradients(optimizer" in note


def _reductions() -> list[list[bool]]:
    """Whether each backward reduces gradients, without and with `reduce_every_micro_batch`."""
    found = []
    for every in (False, True):
        module = SendsInBackward(TWO_MICRO_BATCHES)
        L.seed_everything(7, verbose=False)
        strategy = MoEEPStrategy(ep=2, reduce_every_micro_batch=every)
        trainer(strategy, max_epochs=1, accumulate_grad_batches=2).fit(module)
        found.append(module.reduces)
    return found


class SendsInBackward(CaseModule):
    """Sees whether anything is reduced in a backward."""

    reduces: list[bool]

    def on_before_backward(self, loss: Tensor) -> None:
        self.mode = Reduced()
        self.mode.__enter__()

    def on_after_backward(self) -> None:
        self.mode.__exit__(None, None, None)
        self.reduces = [*getattr(self, "reduces", []), self.mode.elements > 0]


@contract(
    "Gradients",
    "`MoEEPStrategy(reduce_every_micro_batch=True)`",
    "with `accumulate_grad_batches`, reduces gradients after each backward, which takes less memory",
)
def test_one_reduction_a_step_or_one_a_micro_batch(ranks: RankPool) -> None:
    assert ranks.run(_reductions, world=2) == [[[False, True], [True, True]]] * 2


# The norm of each parameter.


class Norms(CaseModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = [grad_norm(self.model, norm_type) for norm_type in (2, "inf")]
        self.log_dict(self.norms[0])


def _norms_of_parameters() -> tuple[dict[str, Tensor], list[dict[str, float]], float]:
    initial, module = Initial(), Norms(CASE)
    fitted = _fit(module, initial)
    logged = float(fitted.callback_metrics["grad_2.0_norm_total"])
    return initial.weights, [{k: float(v) for k, v in norms.items()} for norms in module.norms], logged


@contract(
    "Gradients",
    "`lightning.pytorch.utilities.grad_norm`",
    "works as `lightning_moe_ep.grad_norm`, by the same names; Lightning's own takes no experts",
)
def test_the_norm_of_each_parameter(ranks: RankPool) -> None:
    results = ranks.run(_norms_of_parameters, world=2)
    initial, found, logged = results[0]
    model = oracle.reference_model(CASE.kind, CASE.model, initial)
    assert grad_norm(model, 2) == {}
    for name, gradient in _answer(replace(CASE, world=2), initial).gradients[0].items():
        model.get_parameter(name).grad = gradient
    for norm_type, ours, others in zip((2, "inf"), found, results[1][1], strict=True):
        right = {name: float(norm) for name, norm in lightning_grad_norm(model, norm_type).items()}
        assert ours == pytest.approx(right, rel=1e-4, abs=1e-7) and list(ours) == list(right)
        assert {name: float(norm) for name, norm in grad_norm(model, norm_type).items()} == pytest.approx(right)
        assert ours == others
    assert logged == found[0]["grad_2.0_norm_total"]


# Accumulating by hand.


class ByHand(CaseModule):
    """Reduces gradients in the last backward only."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.automatic_optimization = False
        self.reduces: list[bool] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer, last = self.optimizers(), batch_idx == 1
        with optimizer.toggle_model(sync_grad=last), Reduced() as reduced:
            self.manual_backward(loss_of(self.model, batch) / 2)
        self.reduces.append(reduced.elements > 0)
        if last:
            self.clip_gradients(optimizer, gradient_clip_val=CLIP)
            optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _by_hand() -> tuple[dict[str, Tensor], dict[str, Tensor], list[bool]]:
    initial, module = Initial(), ByHand(TWO_MICRO_BATCHES)
    _fit(module, initial)
    weights = whole(dict(module.model.named_parameters()))
    return initial.weights, {name: initial.weights[name] - weights[name] for name in weights}, module.reduces


@contract("Gradients", "`optimizer.toggle_model(sync_grad=False)`", "works: that backward reduces nothing")
def test_accumulating_by_hand(ranks: RankPool) -> None:
    for initial, step, reduces in ranks.run(_by_hand, world=2):
        assert reduces == [False, True]
        right = _answer(TWO_MICRO_BATCHES, initial).gradients[0]
        norm = oracle.norm_of(right, 2.0)
        for name, gradient in right.items():
            torch.testing.assert_close(step[name], gradient * CLIP / norm, rtol=1e-4, atol=1e-6)


# Two optimizers by turns.


class Turns(CaseModule):
    """Two optimizers, each with a loss of its own for which the other's parameters are switched off."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.automatic_optimization = False
        self.gradients: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            self.manual_backward((1 + number) * loss_of(self.model, batch))
            self.gradients.append(
                whole({name: p.grad for name, p in self.model.named_parameters() if p.grad is not None})
            )
            self.clip_gradients(optimizer, gradient_clip_val=CLIP)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        blocks = list(self.model.blocks.parameters())
        return [torch.optim.SGD(blocks, lr=1.0), torch.optim.SGD(self.model.head.parameters(), lr=1.0)]


def _by_turns(ep: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], dict[str, Tensor]]:
    initial, module = Initial(), Turns(replace(CASE, steps=2))
    _fit(module, initial, ep=ep)
    return initial.weights, module.gradients, whole(dict(module.model.named_parameters()))


@contract("Gradients", "manual optimization", "works, with several optimizers and `toggle_optimizer`")
@pytest.mark.parametrize("ep", [2, 1])
def test_optimizers_by_turns(ranks: RankPool, ep: int) -> None:
    initial, seen, weights = ranks.run(_by_turns, ep, world=2)[0]
    case = replace(CASE, steps=2, world=2)
    model = oracle.reference_model(case.kind, case.model, initial)
    right = []
    for batches in case.batches():
        for number, part in enumerate((model.blocks, model.head)):
            model.zero_grad()
            loss = sum(loss_of(model, batch) for of_rank in batches for batch in of_rank) / 2
            ((1 + number) * loss).backward()
            names = {name: p for name, p in model.named_parameters() if any(p is own for own in part.parameters())}
            right.append({name: p.grad.clone() for name, p in names.items()})
            torch.nn.utils.clip_grad_norm_(part.parameters(), CLIP)
            torch.optim.SGD(part.parameters(), lr=1.0).step()
    for ours, theirs in zip(seen, right, strict=True):
        assert worst(ours, theirs)[0] < 1e-4
    assert worst(weights, {name: p.detach() for name, p in model.named_parameters()})[0] < 1e-4


# Gradients that are not finite.

BROKEN_STEP = 1


class Broken(SGD):
    """In the second of three steps, one expert of rank 1 has an infinite gradient; keeps what changed in each step."""

    def __init__(self, case: Case, manual: bool = False) -> None:
        super().__init__(case)
        self.automatic_optimization = not manual
        self.changed: list[dict[str, bool]] = []

    def _state(self) -> dict[str, list[Tensor]]:
        """Of each optimizer, its weights and its state."""
        optimizers = self.trainer.optimizers
        return {
            name: [
                tensor.detach().clone()
                for group in optimizer.param_groups
                for p in group["params"]
                for tensor in (p, *(optimizer.state[p][key] for key in sorted(optimizer.state[p])))
            ]
            for name, optimizer in zip(("experts", "dense"), optimizers, strict=len(optimizers) == 2)
        }

    def on_train_batch_start(self, *_: Any) -> None:
        self.before = self._state()

    def on_after_backward(self) -> None:
        if self.trainer.global_step // len(self.trainer.optimizers) == BROKEN_STEP and dist.get_rank() == 1:
            expert_parameters(self)[0].grad.to_local()[0, 0, 0] = math.inf

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizers = self.optimizers()
            self.manual_backward(loss)
            for optimizer in optimizers:
                self.clip_gradients(optimizer, gradient_clip_val=CLIP)
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        after = self._state()
        self.changed.append(
            {
                name: not all(a.equal(b) for a, b in zip(self.before[name], after[name], strict=True))
                if len(self.before[name]) == len(after[name])
                else True  # the first step makes the state
                for name in after
            }
        )

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        experts = expert_parameters(self)
        known = {id(parameter) for parameter in experts}
        rest = [parameter for parameter in self.parameters() if id(parameter) not in known]
        return [torch.optim.AdamW(experts, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]


class UserClips(Broken):
    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.clamp_(-1, 1)  # hides the infinity


BROKEN = Case(steps=3)
ACCUMULATED = Case(steps=3, tokens=((16, 3), (5, 8)))


def _skipped(folder: str) -> list[tuple[str, list[dict[str, bool]], dict[str, float], int, float]]:
    found = []
    for name, module, options in (
        ("plain", Broken(BROKEN), {}),
        ("norm", Broken(BROKEN), {"gradient_clip_val": CLIP}),
        ("value", Broken(BROKEN), {"gradient_clip_val": CLIP, "gradient_clip_algorithm": "value"}),
        ("accumulated", Broken(ACCUMULATED), {"gradient_clip_val": CLIP, "accumulate_grad_batches": 2}),
        ("user clips", UserClips(BROKEN), {"gradient_clip_val": CLIP}),
        ("manual", Broken(BROKEN, manual=True), {}),
    ):
        fitted = _fit(module, ExpertGradientCallback(nonfinite="skip", log_grad_norm=False), **options)
        rate = fitted.lr_scheduler_configs[0].scheduler.get_last_lr()[0] if fitted.lr_scheduler_configs else 0.0
        logged = {key: float(value) for key, value in fitted.callback_metrics.items()}
        found.append((name, module.changed, logged, fitted.global_step, rate))
    fitted.save_checkpoint(folder)
    again = ExpertGradientCallback(nonfinite="skip")
    resumed = trainer(MoEEPStrategy(ep=2), callbacks=[again], max_epochs=1)
    resumed.fit(Broken(BROKEN, manual=True), ckpt_path=folder)
    assert again.skipped_steps == 1
    return found


@contract(
    "Gradients",
    "gradients with a NaN or an infinity",
    "works: `ExpertGradientCallback(nonfinite='skip')` leaves out the step on all ranks, logs `skipped_steps`;"
    " schedulers and `global_step` count it; 'keep', the default, steps as Lightning does",
)
def test_a_nonfinite_step_is_left_out_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(_skipped, str(tmp_path / "c.ckpt"), world=2)
    for of_rank in results:
        for name, changed, logged, global_step, rate in of_rank:
            assert logged == {"skipped_steps": 1.0}, name
            if name == "manual":
                # The experts' optimizer alone had it.
                assert [step["experts"] for step in changed] == [True, False, True]
                assert [step["dense"] for step in changed] == [True, True, True] and global_step == 6
                continue
            steps = [False, True, False, False, False, True] if name == "accumulated" else [True, False, True]
            assert [step["experts"] for step in changed] == steps, name
            assert global_step == 3 and rate == pytest.approx(1e-3 / 4), name


def _stopped() -> list[str]:
    messages = []
    for options in ({}, {"gradient_clip_val": CLIP}, {"gradient_clip_val": CLIP, "gradient_clip_algorithm": "value"}):
        for module in (Broken(BROKEN), Broken(BROKEN, manual=True)) if not options else (Broken(BROKEN),):
            with pytest.raises(RuntimeError) as error:
                _fit(module, ExpertGradientCallback(nonfinite="raise", log_grad_norm=False), **options)
            messages.append(str(error.value))
    return messages


@contract(
    "Gradients",
    "to stop at a NaN or an infinity",
    "works: `ExpertGradientCallback(nonfinite='raise')`, an error on every rank that names parameters",
)
def test_a_nonfinite_gradient_is_an_error_on_every_rank_that_names_it(ranks: RankPool) -> None:
    for messages in ranks.run(_stopped, world=2):
        assert len(messages) == 4
        for number, message in enumerate(messages):
            step, of = (2, 4) if number == 1 else (1, 16)
            assert re.fullmatch(
                rf"the gradient norm is inf at step {step} \(dense [0-9.]+, experts inf\). 1 of {of} parameters have"
                r" gradients with a NaN or an infinity: model.blocks.0.moe.experts.gate_up_proj."
                r" ExpertGradientCallback\(nonfinite='skip'\) leaves out such steps, 'keep' takes them",
                message,
            ), message


class Nonfinite(CaseModule):
    """Rank 0's loss is infinite."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * math.inf if dist.get_rank() == 0 else loss


def _everywhere() -> tuple[str, float]:
    with pytest.raises(RuntimeError) as error:
        _fit(Nonfinite(CASE), ExpertGradientCallback(nonfinite="raise"))
    kept = float(_fit(Nonfinite(CASE), gradient_clip_val=CLIP).callback_metrics["grad_norm"])
    return str(error.value), kept


def test_the_first_names_are_given_and_by_default_nothing_happens(ranks: RankPool) -> None:
    for message, kept in ranks.run(_everywhere, world=2):
        assert message.startswith("the gradient norm is nan at step 0 (dense nan, experts nan). ")
        assert "parameters have gradients with a NaN or an infinity: model.blocks.0.norm.weight, " in message
        assert ", ...." in message and math.isnan(kept)


def test_skipping_is_refused_where_it_would_not_happen() -> None:
    callbacks = [ExpertGradientCallback(nonfinite="skip")]
    plain = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=callbacks)
    with pytest.raises(ValueError, match=r"is for MoEEPStrategy: SingleDeviceStrategy would step all the same"):
        plain.fit(CaseModule(Case()))


def test_refuses_what_is_no_choice() -> None:
    with pytest.raises(ValueError, match=r"nonfinite='ignore' is not known; use one of \['keep', 'skip', 'raise'\]"):
        ExpertGradientCallback(nonfinite="ignore")  # type: ignore[arg-type]
