"""What is said of a model is what is in it, and what parallelize would make of it."""

from __future__ import annotations

import pytest
import torch

from lightning_moe_ep import CausalLMModule
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.planning.shapes import Part, shapes_of
from lightning_moe_ep.tools.plan.memory import Spread
from lightning_moe_ep.tools.plan.states import State, observe_states
from tests.tools.plan.runs import DEEPSEEK, Run, on_meta


def test_a_deepseek() -> None:
    shapes = shapes_of(on_meta(Run(kind="deepseek_v3")), precision="bf16-mixed", fp32_modules=["mlp.gate"])
    of = {parameter.name: parameter for parameter in shapes.parameters}
    prefix = "model.model.layers.1"
    stacked = of[f"{prefix}.mlp.experts.gate_up_proj"]
    assert stacked.shape == (8, 48, 64) and stacked.experts == f"{prefix}.mlp.experts" and stacked.unit == prefix
    assert of[f"{prefix}.mlp.shared_experts.down_proj.weight"].experts is None
    assert of["temperature"].unit is None
    assert of[f"{prefix}.mlp.gate.weight"].unit == f"{prefix}.mlp.gate"
    assert of["model.lm_head.weight"].unit == "model"

    units = [(unit.name, unit.role, unit.prefetches) for unit in shapes.units]
    layers = [f"model.model.layers.{number}" for number in range(3)]
    assert units == [
        (f"{layers[1]}.mlp.gate", "fp32", None),
        (f"{layers[2]}.mlp.gate", "fp32", None),
        (layers[0], "block", layers[1]),
        (layers[1], "block", layers[2]),
        (layers[2], "block", None),
        ("model", "root", None),
    ]
    dense, first, second = (shapes.unit(name) for name in layers)
    assert first.kind == second.kind != dense.kind
    assert shapes.unit(f"{prefix}.mlp.gate").gathered == torch.float32
    assert (first.gathered, first.reduced) == (torch.bfloat16, torch.float32)

    assert [experts.name for experts in shapes.experts] == [f"{name}.mlp.experts" for name in layers[1:]]
    experts = shapes.experts[0]
    assert (experts.num_experts, experts.top_k, experts.hidden_size) == (8, DEEPSEEK["num_experts_per_tok"], 64)
    assert experts.dtype == torch.bfloat16 and experts.equal_tokens


def test_tied_weights_count_once() -> None:
    shapes = shapes_of(on_meta(Run(model={"tie_word_embeddings": True})))
    (embedding,) = (parameter for parameter in shapes.parameters if "embed" in parameter.name)
    assert embedding.tied_to == ("model.lm_head.weight",)


def test_parts_are_cut_as_by_chunk() -> None:
    part = Part(gathered=(5, 3), dim=0, ranks=4)
    assert [part.elements(rank) for rank in range(4)] == [6, 6, 3, 0] and part.padded == 6
    assert [len(chunk) * 3 for chunk in torch.empty(5, 3).chunk(4)] == [6, 6, 3]


def test_offloading_leaves_what_fsdp_does_not_manage() -> None:
    module = on_meta(Run(kind="deepseek_v3"))
    shapes = shapes_of(module)
    states = observe_states(module)
    layout = Layout.for_world(2, ep=2)
    whole = sum(4 * parameter.numel for parameter in shapes.parameters if parameter.unit is None)
    spread = Spread(shapes, layout, cpu_offload=True)
    assert spread.resident(states).parameters - spread.offloaded(states).parameters == whole > 0
    assert Spread(shapes, layout).offloaded(states).total == 0


def test_states_of_optimizers() -> None:
    module = on_meta(Run(optimizer="two"))
    shapes_of(module)
    seen = observe_states(module)
    assert seen.names == ("Muon", "SGD") and seen.assumed is None
    assert set(seen.states.values()) == {State(per_element=4, fixed=0)}

    adamw = observe_states(on_meta(Run()))
    assert set(adamw.states.values()) == {State(per_element=8, fixed=4)}
    assert adamw.intermediate > 0 and not adamw.whole_model
    foreach = observe_states(on_meta(Run()), lambda model: torch.optim.Adam(model.parameters(), foreach=True))
    assert foreach.whole_model and foreach.intermediate > 0

    model = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 8}
    causal = CausalLMModule(config=model)
    with torch.device("meta"):
        causal.configure_model()
    fused = observe_states(causal)
    assert fused.names == ("AdamW",) and fused.intermediate == 0 and fused.assumed is None


def test_optimizers_that_cannot_be_asked_or_cannot_work() -> None:
    class Asks(type(on_meta(Run()))):  # type: ignore[misc]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.trainer.datamodule.rate)

    module = on_meta(Run())
    module.__class__ = Asks
    seen = observe_states(module)
    assert seen.names == ("AdamW",)
    assert seen.assumed is not None and "configure_optimizers of Asks cannot be asked" in seen.assumed
    with pytest.raises(NotImplementedError, match="Adafactor does not work on sharded"):
        observe_states(on_meta(Run()), lambda model: torch.optim.Adafactor(model.parameters()))
