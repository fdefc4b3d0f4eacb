"""Every form of stacked experts that transformers describes, and those of any other form, against their own forward."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation

from lightning_moe_ep.dispatch import dispatch_here
from lightning_moe_ep.experts import find_experts, with_zero_gradients
from lightning_moe_ep.experts.stacked import NativeExperts, StackedExperts

E, H, I = 4, 16, 8  # noqa: E741

FORMS: dict[str, dict[str, bool]] = {
    "gate": {},
    "bias": {"has_bias": True},
    "transposed": {"is_transposed": True},
    "transposed, bias": {"is_transposed": True, "has_bias": True},
    "no gate": {"has_gate": False},
    "no gate, bias": {"has_gate": False, "has_bias": True},
    "norm": {"has_post_expert_norm": True},
    "norm, bias, transposed": {"has_post_expert_norm": True, "has_bias": True, "is_transposed": True},
}


def described(**form: bool) -> nn.Module:
    """Experts with the attributes of a form, that compute as transformers does."""

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = E
            width = 2 * I if form.get("has_gate", True) else I
            up = "gate_up_proj" if form.get("has_gate", True) else "up_proj"
            for name, rows, columns in ((up, width, H), ("down_proj", H, I)):
                shape = (E, columns, rows) if form.get("is_transposed") else (E, rows, columns)
                self.register_parameter(name, nn.Parameter(torch.randn(shape) / 3))
                if form.get("has_bias"):
                    self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(E, rows)))
            if form.get("has_post_expert_norm"):
                self.post_expert_norm = nn.RMSNorm(H)
            self.act_fn = nn.SiLU()

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            raise AssertionError("replaced by the interface")

    made = use_experts_implementation(Experts, **form)
    torch.manual_seed(0)
    return made(SimpleNamespace(_experts_implementation="batched_mm"))


class OwnForm(nn.Module):
    """Of no form that we know: three weights, a scale of each expert, and a bias that all share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.n_experts = E
        self.a, self.b, self.c = (nn.Parameter(torch.randn(E, *shape) / 3) for shape in ((H, I), (H, I), (I, H)))
        self.scale = nn.Parameter(torch.rand(E))
        self.shared = nn.Linear(H, H)

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        output = torch.zeros_like(x)
        for number in range(self.n_experts):
            token, slot = (ids == number).nonzero(as_tuple=True)
            rows = (x[token] @ self.a[number]).sin() * (x[token] @ self.b[number]) @ self.c[number]
            rows = self.shared(rows * self.scale[number])
            output = output.index_add(0, token, rows * gates[token, slot, None])
        return output


def results(module: nn.Module, tokens: int = 32) -> dict[str, Tensor]:
    """Output and gradients; expert 1 is never chosen."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, H, generator=generator, requires_grad=True)
    weights = torch.rand(tokens, 2, generator=generator, requires_grad=True)
    index = torch.tensor([[0, 2], [3, 0], [2, 3]]).repeat(tokens, 1)[:tokens]
    output = module(hidden, index, weights)
    (output * torch.linspace(-1, 1, H)).sum().backward()
    named = {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad}
    return named | {name: parameter.grad for name, parameter in module.named_parameters()}


def installed(module: nn.Module, computation: str) -> tuple[nn.Module, type]:
    (found,) = find_experts(nn.ModuleDict({"experts": module}))
    experts = partial(found.adapter.compute, computation=computation)
    found.adapter.install(partial(dispatch_here, experts=experts, num_experts=E), alone=False)
    return module, type(found.adapter)


@pytest.mark.parametrize("computation", ["grouped_mm", "loop", "native", "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_equals_the_module_itself(form: str, computation: str) -> None:
    right = results(described(**FORMS[form]))
    module, adapter = installed(described(**FORMS[form]), computation)
    assert adapter is StackedExperts
    for name, ours in results(module).items():
        torch.testing.assert_close(ours, right[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("computation", ["native", "auto"])
def test_any_other_form_computes_by_itself(computation: str) -> None:
    right = results(OwnForm())
    module, adapter = installed(OwnForm(), computation)
    assert adapter is NativeExperts
    for name, ours in results(module).items():
        torch.testing.assert_close(ours, right[name])


@pytest.mark.parametrize("make", [OwnForm, *(partial(described, **form) for form in FORMS.values())])
def test_without_tokens_every_parameter_has_a_zero_gradient(make: Any) -> None:
    module, _ = installed(make(), "auto")
    ours = results(module, tokens=0)
    assert ours["output"].shape == ours["hidden"].shape == (0, H)
    for name, parameter in module.named_parameters():
        assert torch.equal(ours[name], torch.zeros_like(parameter)), name


def test_arguments_by_name_and_more_dimensions() -> None:
    module, _ = installed(described(), "auto")
    hidden, index, weights = torch.randn(2, 3, H), torch.randint(0, E, (2, 3, 2)), torch.rand(2, 3, 2)
    flat = module(hidden.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1))
    ours = module(hidden, top_k_weights=weights, top_k_index=index)
    assert torch.equal(ours, flat.view(2, 3, H))


def test_zero_gradients_make_no_nan() -> None:
    x, infinite = torch.ones(2, requires_grad=True), torch.full((3,), float("inf"), requires_grad=True)
    frozen = torch.ones(1)
    with_zero_gradients(2 * x, [infinite, frozen]).sum().backward()
    assert x.grad.tolist() == [2, 2] and infinite.grad.tolist() == [0, 0, 0]
