"""The bytes that a plan says are those that ranks have."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_moe_ep.planning.shapes import shapes_of
from lightning_moe_ep.tools.plan.memory import Resident, resident
from lightning_moe_ep.tools.plan.states import observe_states
from tests.pool import RankPool
from tests.tools.plan.runs import Run, measure, on_meta

LORA = {
    "r": 3,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}

ON_2 = {
    "two optimizers": Run(optimizer="two", ep=1),
    "lora": Run(model={"lora": LORA}),
}

MORE_ON_2 = {
    "sgd, experts frozen": Run(optimizer="sgd", frozen=r"\.experts\."),
    "3 experts of odd width": Run(kind="own", model={"num_experts": 3, "intermediate_size": 33}, ep=1),
    "qwen3_moe": Run(),
    "deepseek_v3, bf16-true": Run(kind="deepseek_v3", precision="bf16-true"),
    "replicas": Run(kind="own", ep=1, replicate=2),
}

ON_4 = {
    "deepseek_v3, mixed": Run(kind="deepseek_v3", world=4, ep=2, precision="bf16-mixed"),
    "tied, fp32 router, replicas": Run(
        model={"tie_word_embeddings": True},
        world=4,
        replicate=2,
        precision="bf16-true",
        strategy={"fp32_modules": ["mlp.gate"]},
    ),
}

MORE_ON_4 = {
    "2 experts, empty parts": Run(kind="own", model={"num_experts": 2, "intermediate_size": 33}, world=4),
    "6 experts, efsdp 2": Run(kind="own", model={"num_experts": 6}, world=4),
    "lora, efsdp 2": Run(model={"lora": LORA}, world=4),
    "replicas, experts": Run(world=4, replicate=2, precision="bf16-mixed"),
    "a list of experts": Run(kind="own_list_mixtral", model={"num_experts": 6}, world=4),
}


def planned(run: Run) -> list[Resident]:
    """What each rank is said to keep."""
    module = on_meta(run)
    shapes = shapes_of(module, precision=run.precision, fp32_modules=run.strategy.get("fp32_modules", ()))
    states = observe_states(module)
    assert states.assumed is None
    return [resident(shapes, states, run.layout, rank=rank) for rank in range(run.world)]


def check(runs: dict[str, Run], of_ranks: list[list[dict[str, int]]]) -> None:
    for number, (name, run) in enumerate(runs.items()):
        plan = planned(run)
        for rank, measured in enumerate(of_ranks):
            allocated = measured[number].pop("allocated")
            assert measured[number] == dataclasses.asdict(plan[rank]), f"{name}, rank {rank}"
            assert allocated == plan[0].parameters, f"{name}, rank {rank}"
            assert plan[rank].total <= plan[0].total


CASES = [
    (2, ON_2),
    (4, ON_4),
    *(pytest.param(*case, marks=pytest.mark.more) for case in ((2, MORE_ON_2), (4, MORE_ON_4))),
]


@pytest.mark.parametrize(("world", "runs"), CASES, ids=["2", "4", "more on 2", "more on 4"])
def test_what_stays_is_exact_on_every_rank(ranks: RankPool, world: int, runs: dict[str, Run]) -> None:
    check(runs, ranks.run(measure, list(runs.values()), world=world, timeout=180))
