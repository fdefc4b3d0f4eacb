"""PEFT's LoRA under expert parallelism; the oracle is plain PEFT in one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_moe_ep import Layout, build_meshes, parallelize
from lightning_moe_ep.experts import LoraExperts, expert_parameters, find_experts
from lightning_moe_ep.gradients import scale_gradients
from tests import oracle
from tests.checkpoint.runs import EP2, EP4, FORMS, FSDP, MIXED, N, Run, on, run
from tests.families.tiny import loss_of, tiny_batch, tiny_model
from tests.matrix import mostly_more
from tests.models import build, make_batch
from tests.parity import Case, check, plain, train, worst
from tests.pool import RankPool
from tests.test_precision import error_of

LAYOUTS = {
    "efsdp2": {"world": 2, "ep": 1},
    "ep2": {"world": 2, "ep": 2},
    "efsdp2-ep2": {"world": 4, "ep": 2},
    "replicate2-ep2": {"world": 4, "ep": 2, "replicate": 2},
}

UP, DOWN, OUT = "experts.gate_up_proj", "experts.down_proj", "output_linear.weight"

# Both matrices are random, as with lora_B = 0 the gradient of lora_A would be 0.
START = {"r": 3, "lora_alpha": 7, "init_lora_weights": False}

LORA = {
    "dense": {**START, "target_modules": ["q_proj", "v_proj"]},
    "experts": {**START, "target_modules": [], "target_parameters": [UP, DOWN]},
    "up only": {**START, "target_modules": [], "target_parameters": [UP]},
    "down only": {**START, "target_modules": [], "target_parameters": [DOWN], "use_rslora": True},
    "all": {
        **START,
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": [UP, DOWN, "gate.weight"],
        "rank_pattern": {UP: 4},
    },
    "whole experts": {**START, "target_modules": ["q_proj"], "modules_to_save": ["experts"]},
}


@pytest.mark.parametrize("lora", LORA)
@pytest.mark.parametrize("layout", mostly_more(LAYOUTS, "efsdp2-ep2"))
def test_layouts(ranks: RankPool, layout: str, lora: str) -> None:
    check(ranks, Case(kind="qwen3_moe", model={"lora": LORA[lora]}, steps=2, clip=0.1, **LAYOUTS[layout]))


@pytest.mark.parametrize(
    ("family", "targets"), [("qwen3_moe", (UP, DOWN)), ("gpt_oss", (UP, DOWN)), ("jetmoe", (OUT,))]
)
def test_forms_in_memory_and_in_files(family: str, targets: tuple[str, ...]) -> None:
    """What is in files is what PEFT has, and the product of what is in memory is what PEFT adds to the weight."""
    lora = LoraConfig(**START, target_modules=[], target_parameters=list(targets))
    model = get_peft_model(tiny_model(family), lora)
    adapter = next(found.adapter for found in find_experts(model) if isinstance(found.adapter, LoraExperts))
    wrapper: nn.Module = adapter.module
    in_file = {name: value.clone() for name, value in wrapper.state_dict().items()}
    right = [each.get_delta_weight("default") for each in wrapper.modules() if hasattr(each, "parameter_name")]
    assert len(right) == len(targets)
    adapter.prepare()
    in_memory = dict(wrapper.state_dict())
    changed = {name for name in in_file if in_file[name].shape != in_memory[name].shape}
    assert changed == {name for name in in_file if "lora_" in name}
    for there, back in ((adapter.to_file(in_memory), in_file), (adapter.from_file(in_file), in_memory)):
        assert list(there) == list(back)
        assert all(torch.equal(there[name], back[name]) for name in back)
    for (low_rank,), added in zip(adapter._low_rank().values(), right, strict=True):
        torch.testing.assert_close(low_rank.whole(), added)


def _family(family: str, targets: tuple[str, ...], computation: Any) -> tuple[float, str]:
    """On a rank: how far the gradients are off from those of plain PEFT over all ranks' batches, and where."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        lora = LoraConfig(**START, target_modules=[], target_parameters=list(targets))
        return get_peft_model(tiny_model(family), lora)

    def backward(model: nn.Module) -> dict[str, Tensor]:
        loss_of(family, model, tiny_batch(family, seed=dist.get_rank())).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    right = backward(build())
    assert right
    for gradient in right.values():
        dist.all_reduce(gradient.div_(dist.get_world_size()))
    model = build()
    parallelize(model, build_meshes(Layout.for_world(dist.get_world_size(), ep=2), "cpu"), computation=computation)
    ours = backward(model)
    scale_gradients(expert_parameters(model), 0.5)
    return worst(plain(model, ours), right)


@pytest.mark.more
@pytest.mark.parametrize(
    ("family", "targets", "computations"),
    [
        ("deepseek_v3", (UP, DOWN), ("grouped_mm", "native")),
        ("gpt_oss", (UP, DOWN), ("grouped_mm", "loop", "native")),  # transposed, with biases
        ("aria_text", (UP,), ("grouped_mm",)),
        ("nemotron_h", ("experts.up_proj", DOWN), ("grouped_mm", "loop")),  # no gate
        ("muse_spark_text", (UP, DOWN), ("grouped_mm",)),  # a norm that all experts share
        ("llama4_text", (UP, DOWN), ("grouped_mm", "loop")),  # transposed, which PEFT does not know
        ("longcat_flash", (DOWN,), ("grouped_mm",)),
        ("ernie4_5_vl_moe_text", (UP, DOWN), ("auto",)),
        ("jetmoe", ("input_linear.weight", OUT), ("auto",)),  # not by compute_experts
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_families(ranks: RankPool, family: str, targets: tuple[str, ...], computations: tuple[str, ...]) -> None:
    for computation in computations:
        for error, name in ranks.run(_family, family, targets, computation, world=4):
            assert error < 1e-5, f"{computation}: the gradient of {name} is off by {error:.1e}"


OWN = {**START, "target_modules": ["head"], "target_parameters": [UP, DOWN]}

ODD = {
    "no token on rank 0": Case(tokens=((0,), (16,))),
    "no token anywhere": Case(tokens=((0,),)),
    "unequal micro-batches, one empty": Case(tokens=((5, 0), (0, 7), (3, 3), (0, 0)), world=4, ep=2, steps=2),
    "uneven experts": Case(model={"num_experts": 6, "intermediate_size": 33}, world=4, ep=2),
    "one expert a rank": Case(model={"num_experts": 2}, world=4, ep=2),
    "loop": Case(strategy={"computation": "loop"}, world=4, ep=2),
    "native": Case(strategy={"computation": "native"}, tokens=((0,), (16,))),
    "meta": Case(strategy={"init_on_meta": True}, world=4, ep=2),
    "several chunks": Case(strategy={"dispatcher": "three_chunks"}, tokens=((16, 1), (9, 0))),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes(ranks: RankPool, name: str) -> None:
    check(ranks, dataclasses.replace(ODD[name], model={**ODD[name].model, "lora": OWN}))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_gradients_are_as_good_as_those_of_one_process(ranks: RankPool, precision: str) -> None:
    case = Case(model={"lora": OWN}, world=4, precision=precision)
    initial, ours = ranks.run(train, case, world=4)[0]
    initial = {name: value.float() for name, value in initial.items()}
    right, bf16 = (
        oracle.answer("own", case.model, initial, case.batches(), dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    of_one_process = error_of(bf16.gradients[0], right.gradients[0])
    assert error_of(ours.gradients[0], right.gradients[0]) <= 1.5 * of_one_process
    assert 1e-4 < of_one_process < 0.1  # else the comparison says nothing


def _initial(ep: int) -> dict[str, Tensor]:
    """On a rank: the initial weights, made where they are."""
    return train(Case(model={"lora": {**OWN, "init_lora_weights": True}}, ep=ep, strategy={"init_on_meta": True}))[0]


def test_initial_values_on_meta_are_those_of_peft(ranks: RankPool) -> None:
    at_ep_1, at_ep_2 = (ranks.run(_initial, ep, world=2) for ep in (1, 2))
    for weights in (*at_ep_1, *at_ep_2):
        assert all(torch.equal(weights[name], at_ep_1[0][name]) for name in at_ep_1[0])
    for name, weight in at_ep_1[0].items():
        if "lora_B" in name:
            assert not weight.any()
        elif "lora_A" in name:  # uniform, at most 1 / sqrt(in)
            assert 0.9 < float(weight.abs().max()) * weight.shape[1] ** 0.5 <= 1


def _answers(at_ep: int | None) -> dict[str, Tensor]:
    """On a rank, or in one process: a model of two adapters, by which of them are active."""
    torch.manual_seed(0)
    model = build("own", lora=OWN)
    model.add_adapter("other", LoraConfig(**{**OWN, "r": 2}))
    if at_ep is not None:
        parallelize(model, build_meshes(Layout.for_world(dist.get_world_size(), ep=at_ep), "cpu"))
    x, answers = make_batch("own", 8, seed=0)["x"], {"default": Tensor()}
    for name in ("default", "other"):
        model.set_adapter(name)
        answers[name] = model(x)
    model.base_model.set_adapter(["default", "other"])
    answers["both"] = model(x)
    with model.disable_adapter():
        answers["none"] = model(x)
    answers["both again"] = model(x)
    return {name: answer.detach() for name, answer in answers.items()}


@pytest.mark.parametrize("ep", [1, 2])
def test_several_adapters(ranks: RankPool, ep: int) -> None:
    right = _answers(None)
    assert len({float(answer.sum()) for answer in right.values()}) == 4
    for ours in ranks.run(_answers, ep, world=2):
        error, name = worst(ours, right)
        assert error < 1e-5, f"{name}: off by {error:.1e}"


@pytest.mark.parametrize("form", FORMS)
def test_resuming_at_another_layout_equals_not_stopping(ranks: RankPool, tmp_path: Path, form: str) -> None:
    path, hparams = str(tmp_path / "c.ckpt"), {"lora": OWN}
    right = run(Run(max_steps=2 * N, hparams=hparams)).weights
    on(ranks, Run(EP2, form, save=path, hparams=hparams))
    for at in (FSDP, MIXED, EP4):
        for outcome in on(ranks, Run(at, form, resume=path, max_steps=2 * N, hparams=hparams, seed=8)):
            error, name = worst(outcome.weights, right)
            assert error < 1e-5, f"{name} is off by {error:.1e}"


def _refusal(model: nn.Module) -> str:
    with pytest.raises(NotImplementedError) as error:
        find_experts(model)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda wrapper: wrapper.lora_dropout.update({"default": nn.Dropout(0.1)}), "dropout"),
        (lambda wrapper: wrapper.use_dora.update(default=True), "DoRA"),
        (lambda wrapper: wrapper.lora_bias.update(default=True), "a bias"),
        (lambda wrapper: wrapper.lora_variant.update(default=object()), "another variant of LoRA"),
        (lambda wrapper: wrapper.merge(), r"merged weights (call unmerge_adapter first)"),
    ],
    ids=["dropout", "DoRA", "bias", "variant", "merged"],
)
def test_other_adapters_are_refused(change: Any, words: str) -> None:
    model = build("own", lora=OWN)
    change(model.base_model.model.blocks[1].moe.experts)
    assert _refusal(model) == (
        "the experts module base_model.model.blocks.1.moe.experts (ParamWrapper) has a LoRA adapter on its down_proj"
        f" with {words}, which cannot be spread; use plain LoRA there"
    )


@pytest.mark.parametrize(
    ("family", "target", "words"),
    [
        ("gpt_oss", "experts.down_proj_bias", "has a LoRA adapter on its down_proj_bias [8, 64]; only stacked weights"),
        ("longcat_flash", UP, "has a LoRA adapter on its gate_up_proj [12, 64, 64]; only stacked weights [E, ...]"),
        ("dbrx", "mlp.w1", "(DbrxExperts) has a LoRA adapter on its part mlp; only stacked weights [E, ...]"),
    ],
)
def test_other_parameters_are_refused(family: str, target: str, words: str) -> None:
    lora = LoraConfig(**START, target_modules=[], target_parameters=[target])
    assert words in _refusal(get_peft_model(tiny_model(family), lora))


class Params4bit(nn.Parameter):
    """By its name one of bitsandbytes."""


class Int8Params(nn.Parameter):
    """The other."""


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (Params4bit(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False), "bitsandbytes, 4 bits"),
        (Int8Params(torch.zeros(8, 64, dtype=torch.int8), requires_grad=False), "bitsandbytes, 8 bits"),
        (nn.Parameter(torch.zeros(8, 1, dtype=torch.float8_e4m3fn), requires_grad=False), "torch.float8_e4m3fn"),
    ],
)
def test_quantised_weights_are_refused(weight: nn.Parameter, words: str) -> None:
    model = build("own")
    model.head.weight = weight
    with pytest.raises(NotImplementedError) as error:
        parallelize(model, None)  # type: ignore[arg-type]  # it does not come to the meshes
    assert str(error.value) == (
        f"head.weight of Linear is quantised ({words}), and its parts cannot be sharded; load the model in bf16,"
        " without a quantization_config"
    )
