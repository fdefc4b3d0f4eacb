"""The tiny models of all families, in one process: that they run, without randomness, and that gradients reach them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.families.find import families, is_family
from tests.families.tiny import CANNOT_RUN, NO_GRADIENT, loss_of, tiny_batch, tiny_model

pytestmark = pytest.mark.sweep

RUNNABLE = [family for family in families() if family not in CANNOT_RUN]


@cache
def computed(family: str) -> tuple[nn.Module, Tensor]:
    """The model with its gradients, and the loss."""
    model = tiny_model(family)
    loss = loss_of(family, model, tiny_batch(family, 0))
    loss.backward()
    return model, loss.detach()


def experts_of(model: nn.Module) -> list[nn.Module]:
    names = [(module, type(module).__name__) for module in model.modules()]
    return [module for module, name in names if name.endswith("Experts") and name != "InklingSharedExperts"]


def by_expert(experts: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """The values and the gradients of each parameter, `[E, ...]`, whatever form a family keeps its experts in."""
    if isinstance(experts, nn.ModuleDict):
        named = [list(expert.named_parameters()) for expert in experts.values()]
        return {
            same[0][0]: (torch.stack([p.detach() for _, p in same]), torch.stack([p.grad for _, p in same]))
            for same in zip(*named, strict=True)
        }
    shapes = {  # 3: as it should be; 2: a bias, or dbrx, which flattens the first two dimensions; 1: shared by all
        name: (p, (len(p) if p.ndim == 3 else experts.num_experts, -1))
        for name, p in experts.named_parameters()
        if p.ndim > 1
    }
    return {name: (p.detach().reshape(shape), p.grad.reshape(shape)) for name, (p, shape) in shapes.items()}


def test_no_family_is_overlooked() -> None:
    assert families() == sorted(name for name in CONFIG_MAPPING_NAMES if is_family(name))
    assert {name for name in CONFIG_MAPPING_NAMES if CONFIG_MAPPING[name].base_model_ep_plan} <= set(families())
    assert {"dbrx", "jetmoe", "llama4_text", "longcat_flash", "nllb-moe", "switch_transformers"} <= set(families())
    assert CANNOT_RUN.keys() <= set(families())


@pytest.mark.parametrize("family", RUNNABLE)
def test_a_loss_without_randomness(family: str) -> None:
    _, loss = computed(family)
    assert torch.isfinite(loss)
    assert torch.equal(loss, loss_of(family, tiny_model(family), tiny_batch(family, 0)).detach())
    assert loss != loss_of(family, tiny_model(family), tiny_batch(family, 1)).detach()


@pytest.mark.parametrize("family", RUNNABLE)
def test_gradients_reach_what_they_should(family: str) -> None:
    model, _ = computed(family)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {name for name, gradient in gradients.items() if gradient is None} == {
        name for name in gradients if NO_GRADIENT.search(name)
    }
    sizes = {name: float(gradient.abs().max()) for name, gradient in gradients.items() if gradient is not None}
    largest = max(sizes.values())
    assert {name: size for name, size in sizes.items() if size < 1e-5 * largest} == {}


@pytest.mark.parametrize("family", RUNNABLE)
def test_experts_differ_and_most_are_used(family: str) -> None:
    model, _ = computed(family)
    assert experts_of(model)
    for experts in experts_of(model):
        assert by_expert(experts)
        for name, (values, gradients) in by_expert(experts).items():
            assert len(values.unique(dim=0)) == len(values) >= 4, name
            assert gradients.flatten(1).any(dim=1).sum() >= len(values) / 2, name


def test_what_cannot_run() -> None:
    model = tiny_model("nllb-moe")
    loss_of("nllb-moe", model, tiny_batch("nllb-moe", 0)).backward()
    used = [[p.grad is not None for p in expert.parameters()] for m in experts_of(model) for expert in m.values()]
    assert [each[0] for each in used if each] == ([True] * 2 + [False] * 6) * 2
