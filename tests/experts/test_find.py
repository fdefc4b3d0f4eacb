"""Experts modules are found by what they are; what came near, and what is not supported, is named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_moe_ep import GroupedExperts
from lightning_moe_ep.experts import NoExpertsError, find_experts
from lightning_moe_ep.experts.stacked import NativeExperts, StackedExperts
from tests.models import FAMILIES, build


class Stacked(nn.Module):
    """Stacked weights of the given shapes, called as experts are."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return gate_up


class CalledWithOne(Stacked):
    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return hidden


class Ungated(Stacked):
    _apply_gate = property()  # type: ignore[assignment]  # hasattr is False


def _beside_a_linear(module: nn.Module) -> nn.Module:
    return nn.ModuleDict({"linear": nn.Linear(2, 2), "mlp": nn.Sequential(module)})


@pytest.mark.parametrize("kind", ["own", *FAMILIES])
def test_finds_every_layer(kind: str) -> None:
    found = find_experts(build(kind))
    assert [experts.num_experts for experts in found] == [8, 8]
    model = build(kind)
    for experts, again in zip(found, find_experts(model), strict=True):
        assert again.name == experts.name
        assert model.get_submodule(again.name) is again.module


def test_names_play_no_part() -> None:
    (found,) = find_experts(_beside_a_linear(Stacked(gate_up_proj=(3, 8, 2), down_proj=(3, 2, 4))))
    assert (found.name, found.num_experts) == ("mlp.0", 3)


def test_a_model_without_experts_names_what_came_near() -> None:
    model = nn.ModuleDict(
        {
            "one": CalledWithOne(weight=(4, 2, 2)),
            "two": Stacked(gate_up_proj=(4, 8, 2), down_proj=(3, 2, 4)),
        }
    )
    with pytest.raises(NoExpertsError) as error:
        find_experts(model)
    message = str(error.value)
    assert "this model has no experts module; plain FSDP2 (ModelParallelStrategy) or DDP is what you want" in message
    assert (
        "one (CalledWithOne): it is called with (hidden, scale), not with (hidden, top_k_index, top_k_weights)"
        in message
    )
    assert (
        "two (Stacked): its stacked weights differ in their first dimension: gate_up_proj [4, 8, 2], down_proj"
        " [3, 2, 4]" in message
    )


def test_a_plain_model_has_nothing_near() -> None:
    with pytest.raises(NoExpertsError, match=r"What came near: no module owns stacked \[E, ...\] weights$"):
        find_experts(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))


def test_convolutions_are_not_near() -> None:
    with pytest.raises(NoExpertsError, match="What came near: no module owns"):
        find_experts(nn.Sequential(nn.Conv1d(2, 4, 3), nn.ConvTranspose1d(2, 4, 3)))
    model = nn.Sequential(nn.Conv1d(2, 4, 3), GroupedExperts(2, 4, 3))
    assert [found.name for found in find_experts(model)] == ["1"]


def _described(**shapes: tuple[int, ...]) -> Stacked:
    """With the attributes that transformers gives experts modules."""
    module = Stacked(**shapes)
    module.num_experts = 3
    return module


def _transposed(**shapes: tuple[int, ...]) -> Stacked:
    module = _described(**shapes)
    module.is_transposed = True
    return module


def _ungated() -> Ungated:
    module = Ungated(up_proj=(3, 8, 2), down_proj=(3, 2, 8))
    module.has_gate, module.act_fn = False, nn.ReLU()
    return module


@pytest.mark.parametrize(
    ("module", "adapter"),
    [
        (_described(gate_up_proj=(3, 8, 2), down_proj=(3, 2, 4)), StackedExperts),
        (
            # as in gpt_oss
            _transposed(gate_up_proj=(3, 2, 8), gate_up_proj_bias=(3, 8), down_proj=(3, 4, 2), down_proj_bias=(3, 2)),
            StackedExperts,
        ),
        (_ungated(), StackedExperts),
        (_described(gate_up_proj=(3, 2, 8), down_proj=(3, 4, 2)), NativeExperts),  # nothing says that it is transposed
        (_described(gate_up_proj=(3, 8, 2), down_proj=(3, 2, 4), scale=(3,)), NativeExperts),
        (_described(w1=(3, 8, 2), w2=(3, 2, 4)), NativeExperts),
    ],
    ids=["gated", "bias, transposed", "no gate", "transposed unsaid", "a scale", "other names"],
)
def test_the_form_decides_who_computes(module: nn.Module, adapter: type) -> None:
    (found,) = find_experts(_beside_a_linear(module))
    assert type(found.adapter) is adapter
    assert set(found.adapter.parameters) == {name for name, _ in module.named_parameters()}
    assert found.num_experts == 3


def test_an_unknown_form_has_to_say_how_many_experts_it_has() -> None:
    with pytest.raises(
        NoExpertsError, match=r"mlp.0 \(Stacked\): its weights \(w1, w2\) are not those of gated experts"
    ):
        find_experts(_beside_a_linear(Stacked(w1=(3, 8, 2), w2=(3, 2, 4))))


def test_a_module_dict_of_experts_is_refused() -> None:
    experts = nn.ModuleDict({f"expert_{number}": nn.Linear(2, 2) for number in range(3)})
    with pytest.raises(NotImplementedError) as error:
        find_experts(_beside_a_linear(experts))
    message = str(error.value)
    assert message.startswith(
        "the experts module mlp.0 (ModuleDict) is a ModuleDict of 3 experts, which cannot be spread"
    )
    assert "or to be a ModuleList of equal MLPs" in message and "register_experts" in message
