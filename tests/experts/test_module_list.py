"""Experts that are a ModuleList: gradients against one process, through a real Trainer, and initial weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lightning_moe_ep import Layout, build_meshes, materialize, parallelize
from tests import oracle
from tests.list_models import BLOCKS, ScaledMLP, plain_names
from tests.matrix import mostly_more
from tests.models import build
from tests.parity import Case, train, whole, worst
from tests.pool import RankPool


def check(pool: RankPool, case: Case) -> None:
    """Run the case and compare with one process: gradients to 1e-5, norms to 1e-6, weights to 1e-4."""
    results = pool.run(train, case, world=case.world)
    initial, ours = results[0]
    theirs = oracle.answer(case.kind, case.model, plain_names(initial), case.batches(), clip=case.clip)
    for step, (mine, right) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        error, name = worst(plain_names(mine), right)
        assert error < 1e-5, f"step {step}: the gradient of {name} is off by {error:.1e}"
    for _, answer in results:
        assert answer.norms == ours.norms, "ranks disagree on the norm"
    for mine_norm, right_norm in zip(ours.norms, theirs.norms, strict=True):
        assert abs(mine_norm - right_norm) <= 1e-6 * right_norm
    error, name = worst(plain_names(ours.weights), theirs.weights)
    assert error < 1e-4, f"the weight {name} is off by {error:.1e}"


LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"world": 2, "ep": 2},
    "efsdp2-ep2": {"world": 4, "ep": 2},
    "efsdp2": {"world": 2, "ep": 1},
    "replicate2-ep2": {"world": 4, "ep": 2, "replicate": 2},
}


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("layout", mostly_more(LAYOUTS, "efsdp2-ep2"))
def test_gradients(ranks: RankPool, kind: str, layout: str) -> None:
    check(ranks, Case(kind=kind, steps=2, clip=0.1, **LAYOUTS[layout]))


MIXTRAL, DEEPSEEK, HIT, SCALED = "own_list_mixtral", "own_list_deepseek", "own_list_hit", "own_list_scaled"

ODD = {
    "no token on rank 0": Case(kind=MIXTRAL, tokens=((0,), (16,)), steps=2),
    "no call on rank 0": Case(kind=HIT, tokens=((0,), (16,)), steps=2),
    "no call on rank 1 at ep 1": Case(kind=HIT, tokens=((16,), (0,)), ep=1),
    "no call anywhere": Case(kind=HIT, tokens=((0,),)),
    "one token": Case(kind=HIT, tokens=((1,), (0,)), model={"top_k": 1}),
    "unequal tokens": Case(kind=DEEPSEEK, tokens=((5,), (16,), (1,), (32,)), world=4, ep=2),
    "unequal micro-batches": Case(kind=HIT, tokens=((5, 16, 3), (16, 1, 7)), steps=2, clip=0.1),
    "one expert a rank": Case(kind=DEEPSEEK, model={"num_experts": 4}, world=4, ep=4),
    "uneven experts": Case(kind=MIXTRAL, model={"num_experts": 6, "intermediate_size": 33}, world=4, ep=2),
    "bias": Case(kind=DEEPSEEK, model={"bias": True}, world=4, ep=2),
    "bias, loop": Case(kind=DEEPSEEK, model={"bias": True}, strategy={"computation": "loop"}),
    "loop": Case(kind=MIXTRAL, strategy={"computation": "loop"}),
    "grouped_mm": Case(kind=MIXTRAL, strategy={"computation": "grouped_mm"}),
    "promised equal tokens": Case(kind=HIT, strategy={"equal_tokens": True}),
    "reduce every micro-batch": Case(
        kind=HIT, strategy={"reduce_every_micro_batch": True}, tokens=((5, 16, 3), (16, 1, 7)), steps=2, clip=0.1
    ),
    "meta": Case(kind=DEEPSEEK, strategy={"init_on_meta": True}, model={"bias": True}, world=4, ep=2),
    "meta, own parameters": Case(kind=SCALED, strategy={"init_on_meta": True}),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes(ranks: RankPool, name: str) -> None:
    check(ranks, ODD[name])


@pytest.mark.parametrize("dispatcher", mostly_more(["all_gather", "all_to_all", "three_chunks"], "all_to_all"))
@pytest.mark.parametrize("name", ["no call on rank 0", "unequal tokens"])
def test_dispatchers(ranks: RankPool, name: str, dispatcher: str) -> None:
    check(ranks, dataclasses.replace(ODD[name], strategy={"dispatcher": dispatcher}))


class Pretrained(PreTrainedModel):
    """Of transformers' kind: its experts are initialised by what they are and what is in them."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.inner = build(SCALED, num_experts=4, bias=True)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ScaledMLP):
            nn.init.normal_(module.up, std=0.5)
            nn.init.constant_(module.gain, 3.0)
            nn.init.uniform_(module.shift, 1.0, 2.0)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


def _on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        return Pretrained(PretrainedConfig()) if kind == "pretrained" else build(kind, num_experts=4, bias=True)


def _initial(kind: str, ep: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """On a rank: the initial weights from the meta device by the plain names, and those of the plain model."""
    model, plain = _on_meta(kind), _on_meta(kind)
    parallelize(model, build_meshes(Layout.for_world(dist.get_world_size(), ep=ep), "cpu"))
    for each in (model, plain):
        materialize(each, seed=5, device=torch.device("cpu"))
    return plain_names(whole(dict(model.named_parameters()))), dict(plain.named_parameters())


@pytest.mark.parametrize("kind", [DEEPSEEK, SCALED, "pretrained"])
@pytest.mark.parametrize(("world", "ep"), mostly_more([(1, 1), (2, 1), (2, 2), (4, 2)], (4, 2)))
def test_initial_weights_from_the_meta_device(ranks: RankPool, kind: str, world: int, ep: int) -> None:
    for ours, plain in ranks.run(_initial, kind, ep, world=world):
        assert list(ours) == list(plain)
        assert not [name for name in plain if not torch.equal(ours[name], plain[name])]
        drawn = {name: tensor for name, tensor in plain.items() if ".experts." in name and tensor.unique().numel() > 1}
        assert len(torch.stack([tensor.flatten()[:16] for tensor in drawn.values()]).unique(dim=0)) == len(drawn) > 7
        if kind == "pretrained":
            assert float(plain["inner.blocks.1.moe.experts.2.up"].std()) == pytest.approx(0.5, rel=0.1)
            assert float(plain["inner.blocks.1.moe.experts.2.shift"].min()) > 1
        elif kind == DEEPSEEK:
            bounds = [float(plain[f"blocks.0.moe.experts.0.w1.{name}"].abs().max()) for name in ("weight", "bias")]
            assert all(0.1 < bound <= 0.125 for bound in bounds)  # 1 / sqrt(64)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16(ranks: RankPool, precision: str) -> None:
    case = Case(kind=DEEPSEEK, precision=precision, world=4, ep=1, model={"bias": True})
    right, ours = (
        ranks.run(train, dataclasses.replace(case, ep=ep), world=case.world)[0][1].gradients[0] for ep in (1, 2)
    )
    for name in right:
        difference = (ours[name].float() - right[name].float()).norm() / right[name].float().norm()
        assert float(difference) < 0.02, f"{name}: {float(difference):.3f}"
