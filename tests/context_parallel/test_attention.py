"""Attention over whole sequences on ranks that hold slices: gradients and norms are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lightning_moe_ep.context_parallel import shard_sequences
from lightning_moe_ep.context_parallel.masks import _whole_sequences
from lightning_moe_ep.context_parallel.ring import _OF_CUDA, _kernels
from lightning_moe_ep.context_parallel.ulysses import Ulysses
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.mesh import build_meshes
from lightning_moe_ep.parallelize import parallelize
from tests.context_parallel.parity import FLASH, MODELS, Batch, CPCase, batch_of, build, check, loss_sum
from tests.dispatch.test_base import CountSyncs, count_in_backward
from tests.pool import RankPool


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_parity_on_two_ranks(ranks: RankPool, model: str, ep: int) -> None:
    check(ranks, CPCase(model, ep=ep))


ON_FOUR = [CPCase(model, world=4, ep=ep, batches=("padded", "packed", "odd")) for model in MODELS for ep in (2, 4)]
MORE_ON_FOUR = [
    CPCase("mixtral", world=4, ep=2, replicate=2),
    CPCase("gpt_oss", world=4, cp=4, ep=2),
    CPCase("gpt_oss", world=4, ep=4, batches=("left", "one", "short")),
    CPCase("deepseek_v3", world=4, cp=4),
    CPCase("qwen3_moe", world=4, cp=4, ep=2, batches=("even", "odd", "one"), strategy={"cp_mode": "ring"}),
]


@pytest.mark.parametrize("case", ON_FOUR, ids=lambda case: f"{case.model}-cp{case.cp}-ep{case.ep}")
def test_parity_on_four_ranks(ranks: RankPool, case: CPCase) -> None:
    check(ranks, case)


@pytest.mark.more
@pytest.mark.parametrize("case", MORE_ON_FOUR, ids=lambda case: f"{case.model}-cp{case.cp}-ep{case.ep}")
def test_more_parity_on_four_ranks(ranks: RankPool, case: CPCase) -> None:
    check(ranks, case)


LONG = {"factor": 4.0, "original_max_position_embeddings": 10, "rope_theta": 1e4}
VARIANTS = [
    CPCase("gpt_oss", batches=("padded", "packed"), strategy={"activation_checkpointing": "selective"}),
    CPCase("gpt_oss", batches=("padded", "left", "packed", "both", "odd"), options={"attention": FLASH}),
]
MORE_VARIANTS = [
    CPCase("qwen3_moe", batches=("padded", "packed"), strategy={"activation_checkpointing": "full"}),
    CPCase(
        "qwen3_moe",
        batches=("odd", "one"),
        options={"rope_parameters": {"rope_type": "dynamic", **LONG}, "max_position_embeddings": 10},
    ),
    CPCase(
        "qwen3_moe",
        batches=("odd", "one"),
        options={
            "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, **LONG}
        },
    ),
    CPCase("deepseek_v3", batches=("padded", "packed", "both"), options={"attention": "eager"}),
    CPCase("qwen3_moe", batches=("padded", "packed"), options={"lora": True}),
    CPCase("mixtral", batches=("padded", "packed"), options={"attention": FLASH}),
]


def name_of(case: CPCase) -> str:
    return f"{case.model}-{[*case.options, *case.strategy.values()]}"


@pytest.mark.parametrize("case", VARIANTS, ids=name_of)
def test_parity_of_variants(ranks: RankPool, case: CPCase) -> None:
    check(ranks, case)


@pytest.mark.more
@pytest.mark.parametrize("case", MORE_VARIANTS, ids=name_of)
def test_more_parity_of_variants(ranks: RankPool, case: CPCase) -> None:
    check(ranks, case)


@pytest.mark.more
def test_parity_of_compiled_blocks(ranks: RankPool) -> None:
    check(ranks, CPCase("gpt_oss", batches=("padded", "packed"), strategy={"compile_blocks": True}), timeout=300)


def test_parity_of_a_ring(ranks: RankPool) -> None:
    """On CPU by its own flash kernel."""
    check(ranks, CPCase("qwen3_moe", batches=("even", "odd", "one"), strategy={"cp_mode": "ring"}))


def test_kernels_of_a_ring_on_cuda_take_what_they_hand_on() -> None:
    """Shapes and names of the arguments; that their values are right, only a GPU can show."""
    forward, backward = _kernels("cuda")
    query = torch.empty(2, 4, 16, 8, dtype=torch.bfloat16, device="meta")
    options = {"dropout_p": 0.0, "scale": None}
    out, sums, *rest = forward(query, query, query, is_causal=True, **options)
    kept = {"query": query, "key": query, "value": query, "out": out, "logsumexp": sums}
    handed_on = dict(zip(_OF_CUDA, rest, strict=False))
    gradients = backward(grad_out=out, **kept, is_causal=False, **options, **handed_on)
    assert [gradient.shape for gradient in gradients] == [query.shape] * 3


def look() -> dict[str, Any]:
    """On a rank: what attention is given, how often ranks exchange, and two models beside each other."""
    rank, meshes = dist.get_rank(), build_meshes(Layout.for_world(2, ep=2, cp=2), "cpu")
    seen: dict[str, Any] = {}

    def slice_of(kind: str) -> Batch:
        return shard_sequences(batch_of(kind, 0), rank=rank, size=2)

    exchange, attend = dist.all_to_all_single, F.scaled_dot_product_attention
    calls = {"exchanges": 0, "masked": 0, "causal": 0, "heads": set()}

    def exchanging(*args: Any, **options: Any) -> Any:
        calls["exchanges"] += 1
        return exchange(*args, **options)

    def attending(query: Tensor, *args: Any, **options: Any) -> Tensor:
        calls["masked"] += options["attn_mask"] is not None
        calls["causal"] += options["is_causal"]
        calls["heads"].add(tuple(query.shape[1:3]))
        return attend(query, *args, **options)

    dist.all_to_all_single, F.scaled_dot_product_attention = exchanging, attending
    try:
        for checkpointing in ("none", "selective", "full"):
            model = build("qwen3_moe")
            parallelize(model, meshes, activation_checkpointing=checkpointing)
            calls["exchanges"] = 0
            loss_sum(model, slice_of("even")).backward()
            seen[checkpointing] = calls["exchanges"]
        for kind in ("even", "odd", "padded", "packed"):
            calls |= {"masked": 0, "causal": 0, "heads": set()}
            loss_sum(model, slice_of(kind))
            seen[kind] = (calls["masked"], calls["causal"], calls["heads"])
    finally:
        dist.all_to_all_single, F.scaled_dot_product_attention = exchange, attend

    pair = nn.ModuleDict({"student": build("qwen3_moe"), "teacher": build("gpt_oss")})
    parallelize(pair, meshes, roots=list(pair.values()))
    batch, whole = slice_of("padded"), shard_sequences(batch_of("padded", 0), rank=0, size=1)
    with torch.no_grad():
        seen["student"] = float(sum_over(pair["student"].eval(), batch) - loss_sum(build("qwen3_moe").eval(), whole))
        seen["teacher"] = float(sum_over(pair["teacher"].eval(), batch) - loss_sum(build("gpt_oss").eval(), whole))
    return seen


def sum_over(model: nn.Module, batch: Batch) -> Tensor:
    total = loss_sum(model, batch)
    dist.all_reduce(total)
    return total


def test_what_attention_is_given(ranks: RankPool) -> None:
    for seen in ranks.run(look, world=2):
        assert seen["selective"] == seen["none"], "what was exchanged travels again when it is recomputed"
        # Forward and recomputation of two layers: heads there and back, and of dispatch, what is not remembered.
        assert seen["none"] < seen["full"]
        for kind, length in (("even", 16), ("odd", 14)):
            assert seen[kind] == (0, 2, {(2, length)}), "nothing that needs a mask, and the fast kernels are not used"
        for kind in ("padded", "packed"):
            assert seen[kind] == (2, 0, {(2, 16)})
        assert abs(seen["student"]) < 1e-4 and abs(seen["teacher"]) < 1e-4


def asked_of_the_device() -> dict[str, list[str]]:
    """On a rank: what is asked where the rows are padded, in one forward, one attention, and its backward."""
    meshes = build_meshes(Layout.for_world(2, ep=1, cp=2), "cpu")
    group = meshes.cp_mesh.get_group()
    mask, positions = torch.ones(2, 6, dtype=torch.long), (torch.arange(6) + 6 * meshes.cp_rank).expand(2, 6)
    mask[1, 3 * (1 - meshes.cp_rank) :] = 1 - meshes.cp_rank  # the second row ends in the second slice
    with CountSyncs() as forward:
        sequences = _whole_sequences(torch.arange(12).view(2, 6), mask, positions, group)
    assert sequences.mask is not None and not sequences.mask.all()
    module = nn.Module()
    module.num_key_value_groups, module.sinks = 2, torch.zeros(4)
    query, key, value = (torch.randn(2, heads, 6, 8, requires_grad=True) for heads in (4, 2, 2))
    seen = sequences.mask[:, None, None].expand(2, 1, 12, 12)
    with CountSyncs() as attention:
        ulysses = Ulysses(group, 2, meshes.cp_rank)
        output, _ = ulysses(sdpa_attention_forward, module, query, key, value, seen, flash=False)
        total = output.sum()
    with count_in_backward() as backward:
        total.backward()
    assert query.grad is not None
    return {"forward": forward.syncs, "attention": attention.syncs, "backward": backward}


def test_the_host_waits_once_a_forward(ranks: RankPool) -> None:
    assert ranks.run(asked_of_the_device, world=2) == [{"forward": ["tolist"], "attention": [], "backward": []}] * 2
