"""Tracing a step without data."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_moe_ep.context_parallel import shard_sequences, spread_attention
from lightning_moe_ep.context_parallel.supported import check_supported
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.mesh import Meshes, build_meshes
from lightning_moe_ep.planning.look import look_at
from lightning_moe_ep.planning.sequences import exchanges
from lightning_moe_ep.planning.shapes import shapes_of
from lightning_moe_ep.tools.plan.activations import CausalLM, Trace, Way, trace, traces
from lightning_moe_ep.tools.plan.apart import run_apart
from lightning_moe_ep.tools.plan.kernels import unpadded
from tests.families.find import families
from tests.families.tiny import tiny_model
from tests.tools.plan.runs import Run, StepOf, on_meta

WAYS = [
    Way(ep, dispatcher, kept, device_type=device_type)
    for ep, dispatcher, kept, device_type in (
        (2, "all_to_all", "none", "cpu"),
        (2, "all_to_all", "none", "cuda"),
        (2, "all_to_all", "selective", "cuda"),
        (2, "all_to_all", "full", "cuda"),
        (4, "all_gather", "none", "cuda"),
        (1, "all_gather", "none", "cuda"),
    )
]


def _deepseek() -> torch.nn.Module:
    return on_meta(Run(kind="deepseek_v3", model={"num_hidden_layers": 4}))


def _saved(trace: Trace) -> int:
    """What the block with experts leaves for backward."""
    levels = {event.moment: event.level for event in trace.events if event.unit == "model.model.layers.1"}
    return levels["after"] - levels["before"]


def _traces() -> tuple[list[Trace], str]:
    run = Run(kind="own_list_mixtral")
    with pytest.raises(Exception, match="nonzero") as error:
        traces(partial(on_meta, run), StepOf(run), [Way(2, "all_gather")], "32-true", [])
    return traces(_deepseek, CausalLM(2, 64), WAYS, "bf16-true", []), "".join(error.value.__notes__)


def test_ways() -> None:
    found, told = run_apart(4, 0, _traces)
    assert "the experts of MixtralBlock (model.blocks.0.moe.experts)" in told  # whose block looks at the routing
    scores, fused, selective, full, gathered, alone = map(_saved, found)
    tokens, hidden, heads, bf16 = 2 * 64, 64, 4, 2
    # A CPU keeps the scores where keys and values are of different sizes, and what it makes of them.
    assert scores - fused >= heads * tokens * 64 * bf16
    assert full < selective < fused < scores
    assert full - tokens * hidden * bf16 < 0.2 * fused  # its input and the routing
    assert selective - full >= tokens * hidden * bf16  # a row for each token of the other rank, near enough
    assert abs(gathered - alone) < 1000  # other ranks' tokens are gone, but not before their sums are made
    of_four, of_one = (max(event.highest for event in trace_.events[:4]) for trace_ in found[4:])
    assert of_four - of_one >= 3 * tokens * hidden * bf16
    for trace_ in found:
        first, second = trace_.copies
        assert trace_.copies[first] == ("model.model.layers.0",)
        assert trace_.copies[second] == tuple(f"model.model.layers.{number}" for number in (1, 2, 3))
        assert [event.moment for event in trace_.events] == [
            *("before", "after", "before", "after", "output", "turn"),
            *("before backward", "after backward", "before backward", "after backward", "end"),
        ]
        assert all(event.level <= event.highest for event in trace_.events)


def test_a_dispatcher_that_is_not_known() -> None:
    with pytest.raises(ValueError, match=r"dispatcher='auto' .* is not known; plan with one of \['all_gather',"):
        trace(_deepseek, CausalLM(1, 8), [Way(2, "auto")])


def _hidden(model: torch.nn.Module, cp: int) -> torch.Tensor:
    batch = {"input_ids": torch.zeros(2, 64, dtype=torch.int64)}
    batch = shard_sequences(batch, rank=0, size=cp) if cp > 1 else batch
    return model(**batch, use_cache=False).last_hidden_state.float().sum()


def _families_at_cp() -> dict[str, str]:
    """What is wrong at cp=2 with families that cp has, and that can be run without data at cp=1."""
    meshes, wrong = build_meshes(Layout(1, 1, 2, 2), "cpu"), {}
    for family in families():
        try:
            check_supported(tiny_model(family), cp=2)
            (whole,) = traces(partial(tiny_model, family), _hidden, [Way(1, "-", device_type="cpu")], "32-true", [])
        except Exception:
            continue
        try:
            way = Way(1, "-", device_type="cpu", cp=2)
            (of_slice,) = traces(partial(tiny_model, family), _hidden, [way], "32-true", [])
            share = _highest(of_slice) / _highest(whole)
            sent, expected = _sent(family, meshes), _expected(family)
            wrong[family] = "" if 0.4 < share < 0.8 and sent == expected else f"{share} {sent} {expected}"
        except Exception as error:
            wrong[family] = f"{type(error).__name__}: {error}"
    return wrong


def _highest(trace: Trace) -> int:
    return max(event.highest for event in trace.events)


def _sent(family: str, meshes: Meshes) -> int:
    """Bytes that attentions send in a forward."""
    model, sent = tiny_model(family), 0

    def exchange(received: torch.Tensor, parts: torch.Tensor, *_: Any, **__: Any) -> Any:
        nonlocal sent
        sent += parts.numel() * parts.element_size() // 2
        received.zero_()
        return SimpleNamespace(wait=lambda: None)

    spread_attention(model, meshes, mode="ulysses")
    with unpadded(), patch.object(dist, "all_to_all_single", exchange):
        _hidden(model, 2)
    return sent


def _expected(family: str) -> float:
    model = tiny_model(family).to("meta")
    seen = look_at(model, shapes_of(model), length=64)
    assert seen.assumed is None
    messages = [m for each in seen.attentions for m in exchanges(each, 2 * 32, cp=2, recomputed=False)]
    return sum(message.nbytes for message in messages if message.phase == "forward")


@pytest.mark.sweep
def test_families_at_cp() -> None:
    found = run_apart(2, 0, _families_at_cp)
    assert len(found) > 20 and not {family: told for family, told in found.items() if told}
