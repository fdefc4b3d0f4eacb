"""Which probabilities a router gives: by its own logits, in the way that its weights tell."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_moe_ep.callbacks.router_scores import SCORES, RouterScores
from lightning_moe_ep.experts import find_experts, find_routers, watch_routing
from tests.families.tiny import tiny_batch, tiny_model

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = range(3)


class Router(nn.Module):
    def __init__(self, way: int, top_k: int, normalize: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.way, self.top_k, self.normalize, self.dtype = way, top_k, normalize, dtype

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = SCORES[self.way](logits)
        weights, index = scores.topk(self.top_k, dim=1)
        if self.normalize:
            weights = weights / weights.sum(dim=1, keepdim=True) * 2.5
        return logits.to(self.dtype), weights.to(self.dtype), index


def scores_of(router: nn.Module, *calls: Tensor) -> RouterScores:
    scores = RouterScores(router, 8, torch.device("cpu"))
    scores.counting = True
    for logits in calls:
        _, weights, index = router(logits)
        scores.count(index, weights)
    return scores


def decided(scores: RouterScores) -> tuple[int | None, Tensor | None]:
    misfits = scores.misfits.double().numpy()
    scores.decide(misfits, scores.tokens)
    found = scores.probabilities(scores.sums.double().numpy(), misfits, scores.tokens)
    return scores.way, None if found is None else torch.from_numpy(found)


LOGITS = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("way", [SOFTMAX, SIGMOID, SQRT_SOFTPLUS])
@pytest.mark.parametrize(
    ("top_k", "normalize", "dtype"),
    [(2, True, torch.float32), (4, False, torch.bfloat16), (1, False, torch.float32)],
)
def test_way(way: int, top_k: int, normalize: bool, dtype: torch.dtype) -> None:
    scores = scores_of(Router(way, top_k, normalize, dtype), LOGITS[:40], LOGITS[40:], LOGITS[:0])
    found, probabilities = decided(scores)
    assert found == way
    right = SCORES[way](LOGITS.to(dtype).float())
    right = (right / right.sum(dim=1, keepdim=True)).mean(dim=0)
    assert probabilities is not None
    torch.testing.assert_close(probabilities, right.double(), rtol=1e-4, atol=1e-5)
    assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-5)

    scores.reset()  # and once it is known, only that is counted
    _, weights, index = Router(way, top_k, normalize)(LOGITS)
    scores._logits = LOGITS
    scores.count(index, weights)
    assert [bool(sums.any()) for sums in scores.sums] == [number == way for number in range(3)]
    assert decided(scores)[1] is not None


def test_weights_that_are_made_otherwise() -> None:
    router = Router(SOFTMAX, 2, False)
    scores = RouterScores(router, 8, torch.device("cpu"))
    scores.counting = True
    logits, _, index = router(LOGITS)
    scores.count(index, torch.tensor([[0.9, 0.1]]).expand(64, 2))
    assert decided(scores) == (None, None)
    # Without tokens nothing is known, and a token without experts says nothing.
    scores = scores_of(router, LOGITS[:0])
    assert decided(scores) == (None, None)
    router(logits)
    scores.count(torch.full_like(index, 8), torch.ones(64, 2))
    assert scores.tokens == 64 and not scores.misfits.any()


def test_logits_that_are_not_those_of_the_choice() -> None:
    scores = scores_of(Router(SOFTMAX, 2, True))
    scores.count(torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))  # no router ran before
    router = nn.Linear(8, 7)
    scores = RouterScores(router, 8, torch.device("cpu"))
    scores.counting = True
    router(LOGITS)
    assert scores._logits is None and scores.tokens == 0
    scores.close()


FAMILIES = {"qwen3_moe": SOFTMAX, "deepseek_v3": SIGMOID, "gpt_oss": SOFTMAX, "dbrx": SOFTMAX, "lfm2_moe": SIGMOID}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    torch.manual_seed(0)
    model = tiny_model(family)
    found, routers = find_experts(model), find_routers(model)
    scores = {each.name: RouterScores(routers[each.name], each.num_experts, torch.device("cpu")) for each in found}
    for each in found:
        scores[each.name].counting = True
        watch_routing(each, partial(_count, scores[each.name]))
    for parameter in (p for router in routers.values() for p in router.parameters()):
        nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        model(**tiny_batch(family, seed=0))
    assert [decided(of)[0] for of in scores.values()] == [FAMILIES[family]] * len(found)


def _count(scores: RouterScores, top_k_index: Tensor, top_k_weights: Tensor) -> None:
    scores.count(top_k_index, top_k_weights)
