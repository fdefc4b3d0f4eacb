"""Operations of a token and seconds of a step, against what they are by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_moe_ep import Layout
from lightning_moe_ep.planning.estimate import cost_of, time_of
from lightning_moe_ep.planning.exchange import Message
from lightning_moe_ep.planning.look import Look, by_parameters, look_at
from lightning_moe_ep.planning.machine import Machine
from lightning_moe_ep.planning.shapes import shapes_of
from lightning_moe_ep.planning.wire import Step, Wire, layers_of
from tests.models import build

HIDDEN, LAYERS, HEADS, HEAD, EXPERTS, TOP_K, INNER, VOCABULARY = 64, 3, 4, 16, 8, 2, 32, 99


def test_operations_of_a_token() -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=INNER,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    forward = type(model.model.layers[0].mlp.experts).forward
    shapes = shapes_of(model)
    of_experts = LAYERS * TOP_K * 2 * 3 * HIDDEN * INNER
    products = LAYERS * 2 * (4 * HIDDEN * HEADS * HEAD + HIDDEN * EXPERTS) + 2 * HIDDEN * VOCABULARY
    attention = LAYERS * 4 * HEADS * HEAD  # of a token with each other: its score, and its share of the values
    seen = look_at(model, shapes, length=100)
    assert seen.assumed is None and seen.expert_flops == of_experts
    assert seen.flops == pytest.approx(of_experts + products + 100 * attention, rel=1e-3)
    assert by_parameters(model, shapes, "asked").flops == of_experts + products
    assert model.model.layers[0].mlp.experts.forward.__func__ is forward  # it is left as it was


def test_of_other_models_the_parameters_count() -> None:
    with torch.device("meta"):
        model = build("own")
    seen = look_at(model, shapes := shapes_of(model), length=100)
    assert seen.assumed is not None and "no model of transformers" in seen.assumed
    assert seen == by_parameters(
        model, shapes, "it is no model of transformers, whose forward could be run without data"
    )
    (layer, _) = layers_of(shapes, seen.routing).values()
    assert (layer.weight_bytes, layer.returns_again) == (4, True)


def wire(*messages: Message, inside: float = 1.0) -> Wire:
    groups = ("fsdp", "ep")
    return Wire(messages, {(group, everyone): inside for group in groups for everyone in (False, True)})


GATHERED = Message("weights gathered", "forward", "fsdp", 100, "all_gather", calls=2)
SENT = Message("tokens to experts", "forward", "ep", 50, "all_to_all", calls=1)


def test_seconds_of_a_step() -> None:
    look, step = Look(flops=10, expert_flops=6), Step(tokens=4)
    machine = Machine(flops=10, intra=10, latency=0.5)
    time = time_of(wire(GATHERED, SENT), look, step, machine)
    assert time is not None
    assert (time.compute, time.fsdp, time.exchange) == (12, 11, 5.5)
    assert (time.fastest, time.slowest, time.middle) == (17.5, 28.5, 23)
    recomputed = time_of(wire(GATHERED), look, Step(tokens=4, activation_checkpointing="full"), machine)
    assert recomputed is not None and recomputed.compute == 16
    apart = time_of(wire(GATHERED, inside=0.5), look, step, Machine(flops=10, intra=10, inter=1, latency=0))
    assert apart is not None and apart.fsdp == 55
    chunks = Step(tokens=2048, dispatcher="overlapped")
    overlapped = time_of(wire(SENT), look, chunks, machine)
    assert overlapped is not None and overlapped.fastest == overlapped.slowest - overlapped.exchange / 2


def test_nothing_is_claimed_without_figures() -> None:
    look, step = Look(flops=10, expert_flops=6), Step(tokens=4)
    assert time_of(wire(GATHERED), look, step, Machine()) is None
    assert time_of(wire(GATHERED), look, step, Machine(flops=1)) is None
    assert time_of(wire(GATHERED, inside=0.5), look, step, Machine(flops=1, intra=1)) is None
    assert cost_of(wire(GATHERED, inside=0.5)) == 50 + 9 * 50


def test_groups_of_a_layout_on_nodes() -> None:
    from lightning_moe_ep.planning.wire import _share_inside

    layout = Layout(replicate=2, efsdp=4, ep=8)
    shares = {
        group: _share_inside(group, layout, 8, to_everyone=False)  # type: ignore[arg-type]
        for group in ("ep", "efsdp", "fsdp", "replicate", "world")
    }
    assert shares == {"ep": 1, "efsdp": 0, "fsdp": 7 / 8, "replicate": 0, "world": 7 / 8}
