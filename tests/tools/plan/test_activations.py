"""Tracing a step without data."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lightning_moe_ep.tools.plan.activations import CausalLM, Trace, Way, trace, traces
from lightning_moe_ep.tools.plan.apart import run_apart
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
