"""Parameters that are not trained: the rest has the gradients of one process, and nothing is sent for the frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_moe_ep import CausalLMModule, MoEEPStrategy
from tests.checkpoint.runs import EP2, EP4, FORMS, MIXED, N, Run, on, run
from tests.matrix import mostly_more
from tests.models import build
from tests.parity import Case, CaseModule, check, trainer, worst
from tests.pool import RankPool
from tests.test_causal_lm import CONFIG, Batches

LAYOUTS = {
    "efsdp2": {"world": 2, "ep": 1},
    "ep2": {"world": 2, "ep": 2},
    "efsdp2-ep2": {"world": 4, "ep": 2},
    "replicate2-ep2": {"world": 4, "ep": 2, "replicate": 2},
}

EXPERTS, ROUTER = r"\.experts\.", r"\.(router|gate)\."

FROZEN = {
    "experts": EXPERTS,
    "half of the experts' weights": r"\.down_proj$",
    "router": ROUTER,
    "all but the router": rf"^(?!.*{ROUTER})",
    "all but the first experts": r"^(?!.*\.0\.mlp\.experts\.)",
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("layout", mostly_more(LAYOUTS, "efsdp2-ep2"))
def test_gradients_of_the_rest(ranks: RankPool, layout: str, frozen: str) -> None:
    check(ranks, Case(kind="qwen3_moe", steps=2, clip=0.1, frozen=FROZEN[frozen], **LAYOUTS[layout]))


@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all", "three_chunks"])
@pytest.mark.parametrize("frozen", [EXPERTS, r"^(?!.*\.0\.moe\.experts\.)"], ids=["experts", "all but experts"])
def test_unequal_micro_batches(ranks: RankPool, dispatcher: str, frozen: str) -> None:
    tokens = ((5, 16, 0), (16, 0, 7))
    check(ranks, Case(tokens=tokens, steps=2, clip=0.1, frozen=frozen, strategy={"dispatcher": dispatcher}))


class Reduced(TorchDispatchMode):
    """Counts what gradients are reduced: the elements that go into each reduce-scatter and all-reduce."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::_reduce_scatter_base_":
            self.elements += args[1].numel()
        elif func.name() == "c10d::allreduce_":
            self.elements += sum(tensor.numel() for tensor in args[0])
        return func(*args, **(kwargs or {}))


class CountReduced(L.Callback):
    def on_before_backward(self, *_: Any) -> None:
        self.mode = Reduced()
        self.mode.__enter__()

    def on_after_backward(self, *_: Any) -> None:
        self.mode.__exit__(None, None, None)


def _reduced(case: Case) -> tuple[int, dict[str, int]]:
    """On a rank: how many elements of gradients it put into reductions, and how many each trained parameter has."""
    module, count = CaseModule(case), CountReduced()
    trainer(MoEEPStrategy(ep=case.ep), max_epochs=1, callbacks=[count]).fit(module)
    return count.mode.elements, {name: p.numel() for name, p in module.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("frozen", ["experts", "half of the experts' weights", "all but the first experts"])
@pytest.mark.parametrize("layout", mostly_more(["efsdp2", "ep2", "efsdp2-ep2"], "efsdp2-ep2"))
def test_nothing_frozen_is_reduced(ranks: RankPool, layout: str, frozen: str) -> None:
    case = Case(kind="qwen3_moe", frozen=FROZEN[frozen], **LAYOUTS[layout])
    for elements, trained in ranks.run(_reduced, case, world=case.world):
        of_experts = sum(size for name, size in trained.items() if ".experts." in name)
        dense = sum(trained.values()) - of_experts
        if case.ep == case.world:  # each expert is on one rank only
            of_experts = 0
        assert elements == dense + of_experts // case.ep


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "frozen", mostly_more([EXPERTS, r"\.down_proj$"], r"\.down_proj$"), ids=["experts", "half of them"]
)
def test_checkpoints(ranks: RankPool, tmp_path: Path, form: str, frozen: str) -> None:
    """Frozen or not, weights are in the checkpoint; the optimizer, which was given all parameters, resumes too."""
    path, hparams = str(tmp_path / "c.ckpt"), {"frozen": frozen}
    right = run(Run(max_steps=2 * N, hparams=hparams)).weights
    (start, *_) = on(ranks, Run(EP2, form, save=path, hparams=hparams))
    kept = [name for name in right if ".experts." in name and torch.equal(start.weights[name], right[name])]
    assert len(kept) == (4 if frozen == EXPERTS else 2)
    for at in (MIXED, EP4):
        for outcome in on(ranks, Run(at, form, resume=path, max_steps=2 * N, hparams=hparams, seed=8)):
            error, name = worst(outcome.weights, right)
            assert error < 1e-5, f"{name} is off by {error:.1e}"


def _causal_lm(freeze: str, ep: int) -> tuple[set[str], set[str], set[str]]:
    """On a rank: the names of the parameters that are frozen, that have a gradient, and that the optimizer has."""
    module = CausalLMModule(CONFIG, freeze=freeze)
    seen = Gradients()
    fitted = trainer(MoEEPStrategy(ep=ep), max_steps=1, callbacks=[seen])
    fitted.fit(module, Batches((((1, 0),),) * 4))
    names = {id(parameter): name for name, parameter in module.model.named_parameters()}
    optimized = {names[id(p)] for group in fitted.optimizers[0].param_groups for p in group["params"]}
    return {name for name, p in module.model.named_parameters() if not p.requires_grad}, seen.names, optimized


class Gradients(L.Callback):
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.names = {name for name, p in pl_module.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("freeze", "pattern"), [("experts", ".mlp.experts."), ("router", ".mlp.gate."), ("none", "?")])
def test_the_option_of_causal_lm_module(ranks: RankPool, freeze: str, pattern: str) -> None:
    names = {name for name, _ in build("qwen3_moe").named_parameters()}
    right = {name for name in names if pattern in name}
    assert len(right) == {"experts": 4, "router": 2, "none": 0}[freeze]
    for frozen, with_gradient, optimized in ranks.run(_causal_lm, freeze, 2, world=4):
        assert frozen == right
        assert with_gradient == optimized == names - right


def test_another_option_is_refused() -> None:
    with pytest.raises(ValueError, match=r"freeze='expert' is not known; use one of \['none', 'experts', 'router'\]"):
        CausalLMModule(CONFIG, freeze="expert")  # type: ignore[arg-type]
