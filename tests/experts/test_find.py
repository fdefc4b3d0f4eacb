"""Experts modules are found by what they are; what came near, and what is not supported, is named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_moe_ep import GroupedExperts
from lightning_moe_ep.experts import NoExpertsError, find_experts
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
    assert "one (CalledWithOne): it is called with (hidden), not with (hidden, top_k_index, top_k_weights)" in message
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


def _transposed() -> Stacked:
    module = Stacked(gate_up_proj=(3, 2, 8), down_proj=(3, 4, 2))
    module.is_transposed = True  # what transformers calls it
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            # as in gpt_oss
            Stacked(gate_up_proj=(3, 2, 8), gate_up_proj_bias=(3, 8), down_proj=(3, 4, 2), down_proj_bias=(3, 2)),
            "has the parameters down_proj, down_proj_bias, gate_up_proj, gate_up_proj_bias",
        ),
        (_transposed(), "stores transposed weights"),
        (Stacked(up_proj=(3, 8, 2), down_proj=(3, 2, 8)), "has the parameters down_proj, up_proj"),
        (Ungated(gate_up_proj=(3, 8, 2), down_proj=(3, 2, 4)), "has no `_apply_gate` method"),
    ],
    ids=["bias", "transposed", "other weights", "no gate"],
)
def test_unsupported_form_is_refused_by_name(module: nn.Module, reason: str) -> None:
    with pytest.raises(NotImplementedError) as error:
        find_experts(_beside_a_linear(module))
    message = str(error.value)
    assert message.startswith(f"the experts module mlp.0 ({type(module).__name__}) {reason}")
    assert message.endswith("supported are gated experts with weights gate_up_proj [E, 2I, H] and down_proj [E, H, I]")
