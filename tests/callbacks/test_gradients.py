"""The gradient callback among others, in manual optimization, and what it logs and refuses."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_ep import ExpertGradientCallback, MoEEPStrategy
from lightning_moe_ep.experts import expert_parameters
from tests import oracle
from tests.models import loss_of
from tests.parity import Case, CaseModule, trainer, whole, worst
from tests.pool import RankPool

CASE = Case(world=4, ep=2, tokens=((16,), (7,), (9,), (0,)))
TWO_BACKWARDS = Case(world=4, ep=2, tokens=((16, 5), (7, 8), (9, 0), (0, 3)))
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


def test_clipping_by_value(ranks: RankPool) -> None:
    options = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    initial, step, _ = ranks.run(_stepped, options, 2.0, world=4)[0]
    right = _answer(CASE, initial).gradients[0]
    assert max(float(gradient.abs().max()) for gradient in right.values()) > 1e-3
    for name, gradient in right.items():
        torch.testing.assert_close(step[name], gradient.clamp(-1e-3, 1e-3), rtol=1e-4, atol=1e-6)


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


class Nonfinite(CaseModule):
    """Rank 0's loss is infinite."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * math.inf if dist.get_rank() == 0 else loss


def _nonfinite(options: dict[str, Any]) -> str:
    with pytest.raises(RuntimeError) as error:
        _fit(Nonfinite(CASE), ExpertGradientCallback(error_if_nonfinite=True), **options)
    return str(error.value)


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": CLIP}], ids=["no clip", "clip"])
def test_nonfinite_norm_is_an_error_on_every_rank(ranks: RankPool, options: dict[str, Any]) -> None:
    for message in ranks.run(_nonfinite, options, world=4):
        assert message.startswith("the gradient norm is nan at step 0 (dense nan, experts nan)")
        assert "set error_if_nonfinite=False on ExpertGradientCallback to go on" in message


def _nonfinite_passes() -> float:
    return float(_fit(Nonfinite(CASE), gradient_clip_val=CLIP).callback_metrics["grad_norm"])


def test_nonfinite_norm_passes_by_default(ranks: RankPool) -> None:
    assert all(map(math.isnan, ranks.run(_nonfinite_passes, world=4)))
