"""The most memory that a plan says a step needs is what torch's own tracker sees in a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from lightning_moe_ep.planning.shapes import shapes_of
from lightning_moe_ep.tools.plan.activations import Trace, Way, traces
from lightning_moe_ep.tools.plan.apart import run_apart
from lightning_moe_ep.tools.plan.memory import Spread
from lightning_moe_ep.tools.plan.peak import Moment, StepOptions, peak
from lightning_moe_ep.tools.plan.states import observe_states
from tests.pool import RankPool
from tests.tools.plan.runs import Run, StepOf, measure_peaks, on_meta
from tests.tools.plan.test_memory import LORA

WIDE = {"hidden_size": 128, "vocab_size": 1000}
GROUPED = {"computation": "grouped_mm"}

RUNS = {
    "all_to_all": Run(model=WIDE, sequences=32, strategy={"dispatcher": "all_to_all"}, precision="bf16-mixed"),
    "long sequences": Run(model=WIDE, ep=1, sequences=1, length=1024, strategy=GROUPED),
    "many weights": Run(
        model={**WIDE, "num_experts": 64, "moe_intermediate_size": 128}, sequences=1, ep=1, strategy=GROUPED
    ),
    "added up, unreduced": Run(
        model={**WIDE, "num_hidden_layers": 3},
        sequences=4,
        ep=1,
        accumulate=2,
        precision="bf16-mixed",
        strategy=GROUPED,
    ),
}
"""On 2 ranks."""

MORE = {
    "all_gather": Run(model=WIDE, sequences=32, strategy={"dispatcher": "all_gather"}),
    "ep=1": Run(model=WIDE, sequences=32, ep=1, strategy=GROUPED),
    "recomputed": Run(
        model=WIDE, sequences=32, strategy={"dispatcher": "all_to_all", "activation_checkpointing": "full"}
    ),
    "not resharded": Run(model=WIDE, sequences=4, ep=1, strategy={**GROUPED, "reshard_after_forward": False}),
    "added up, reduced": Run(
        model=WIDE, sequences=32, accumulate=2, strategy={"dispatcher": "all_to_all", "reduce_every_micro_batch": True}
    ),
    "rows remembered": Run(
        model=WIDE, sequences=32, strategy={"dispatcher": "all_gather", "activation_checkpointing": "selective"}
    ),
    "overlapped": Run(model=WIDE, sequences=160, strategy={"dispatcher": "overlapped"}),
    "deepseek_v3": Run(kind="deepseek_v3", sequences=32, precision="bf16-true", strategy={"dispatcher": "all_to_all"}),
    "own": Run(kind="own", model={"num_experts": 16}, sequences=64, strategy={"dispatcher": "all_gather"}),
    "lora": Run(model={**WIDE, "lora": LORA}, sequences=16, strategy={"dispatcher": "all_to_all"}),
    "frozen embedding": Run(model=WIDE, frozen="embed", sequences=16, strategy={"dispatcher": "all_gather"}),
    "replicas": Run(model=WIDE, sequences=4, ep=1, replicate=2, precision="bf16-true", strategy=GROUPED),
}

LONG = {"dispatcher": "all_to_all"}
CP = {
    "cp 2": Run(model=WIDE, cp=2, sequences=2, length=256, strategy=LONG, precision="bf16-mixed"),
    "cp 2, more heads than keys": Run(
        model={**WIDE, "num_attention_heads": 8, "num_key_value_heads": 1}, ep=1, cp=2, sequences=1, length=301
    ),
}
"""On 2 ranks."""

CP_MORE = {
    "cp 2, recomputed": Run(
        model=WIDE, cp=2, length=256, strategy={**LONG, "activation_checkpointing": "full"}, precision="bf16-true"
    ),
    "cp 2, exchanged once": Run(
        model=WIDE, cp=2, length=256, strategy={**LONG, "activation_checkpointing": "selective"}
    ),
    "cp 2, masks of windows": Run(kind="mixtral", model={"sliding_window": 32}, cp=2, length=1024, sequences=1),
    "cp 2, deepseek_v3": Run(kind="deepseek_v3", cp=2, length=256, precision="bf16-true", strategy=LONG),
}

CP_4 = {"cp 4": Run(model=WIDE, world=4, cp=4, length=256, strategy=LONG)}

LARGE = {"hidden_size": 128, "num_experts": 16, "moe_intermediate_size": 64}

ON_4 = {
    "efsdp 2": Run(model=LARGE, world=4, sequences=4, precision="bf16-mixed", strategy={"dispatcher": "all_to_all"}),
    "replicas": Run(
        model=LARGE,
        world=4,
        replicate=2,
        sequences=4,
        precision="bf16-true",
        strategy={"dispatcher": "all_gather"},
    ),
    "padded": Run(kind="own", model={"num_experts": 6}, world=4, sequences=8, strategy={"dispatcher": "all_to_all"}),
}


def way_of(run: Run) -> Way:
    chosen = {"dispatcher": "all_to_all", "activation_checkpointing": "none", **run.strategy}
    names = ("dispatcher", "activation_checkpointing", "computation", "combine_dtype")
    return Way(ep=run.ep, cp=run.cp, device_type="cpu", **{name: chosen[name] for name in names if name in chosen})


def trace_all(runs: list[Run]) -> list[Trace]:
    """In another process."""
    return [traces(partial(on_meta, run), StepOf(run), [way_of(run)], run.precision, [])[0] for run in runs]


def planned(runs: list[Run]) -> Iterator[Moment]:
    for run, trace in zip(runs, run_apart(4, 0, trace_all, runs), strict=True):
        module = on_meta(run)
        spread = Spread(shapes_of(module, precision=run.precision), run.layout)
        names = ("reshard_after_forward", "reduce_every_micro_batch")
        options = {name: run.strategy[name] for name in names if name in run.strategy}
        yield peak(spread, observe_states(module), trace, StepOptions(accumulate=run.accumulate, **options))


def check(ranks: RankPool, runs: dict[str, Run], world: int = 2, within: float = 0.1) -> None:
    of_ranks = ranks.run(measure_peaks, list(runs.values()), world=world, timeout=240)
    for number, (name, moment) in enumerate(zip(runs, planned(list(runs.values())), strict=True)):
        seen = max(rank[number] for rank in of_ranks)
        print(f"{name}: {moment.total / seen:.3f} of {seen}: {moment}")
        assert abs(moment.total - seen) < within * seen, f"{name}: {moment}, but {seen}"


def test_peaks_are_those_of_runs(ranks: RankPool) -> None:
    check(ranks, RUNS)


def test_peaks_at_cp(ranks: RankPool) -> None:
    check(ranks, CP, within=0.05)


@pytest.mark.more
def test_more_peaks_are_those_of_runs(ranks: RankPool) -> None:
    check(ranks, MORE)


@pytest.mark.sweep
def test_more_peaks_at_cp(ranks: RankPool) -> None:
    check(ranks, CP_MORE, within=0.05)
    check(ranks, CP_4, world=4, within=0.05)


@pytest.mark.more
def test_peaks_on_4_ranks(ranks: RankPool) -> None:
    check(ranks, ON_4, world=4)
