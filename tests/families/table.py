"""The table of families in the docs: a row for each, from what the sweep finds. `make families` writes it anew."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_moe_ep.experts import ExpertsAdapter, find_experts
from lightning_moe_ep.experts.stacked import NativeExperts, StackedExperts
from tests.families.find import families
from tests.families.slices import cp_outcome
from tests.families.sweep import sweep
from tests.families.tiny import CANNOT_RUN, tiny_model
from tests.pool import RankError, RankPool

FILE = Path(__file__).parents[2] / "docs" / "families.md"

HEADER = """\
# Mixture-of-Experts families of transformers

Every configuration of transformers that describes a model with experts, and what became of it: a tiny model of it, on
two ranks with ep=2, has the gradients of one process in every parameter, to 1e-5 of the parameter's largest, and its
state dict, gathered, is the plain model's. Under `cp`: at cp=2 on two ranks, outputs and gradients of padded and of
packed sequences are those of one process on whole sequences, or `MoEEPStrategy(cp=2)` refuses the model and says why.
The list is read off transformers, and `make families` writes this file from a run.

| model type | experts module | parameters that are spread | served by | result | cp |
|---|---|---|---|---|---|
"""


def outcome(ranks: RankPool, family: str) -> str:
    """Runs the family; what the last column says."""
    if family in CANNOT_RUN:
        return f"does not run in one process: {CANNOT_RUN[family]}"
    try:
        find_experts(tiny_model(family))
    except (NotImplementedError, ValueError) as error:
        return f"refused: {error}"
    try:
        wrong = ranks.run(sweep, family, 2, world=2)[0]
    except RankError as error:
        return f"fails: {str(error).strip().splitlines()[-1]}"
    return f"wrong: {'; '.join(wrong)}" if wrong else "works"


def row(family: str, result: str, of_slices: str) -> str:
    """The family's line."""
    experts, parameters, adapters = "", "", ""
    if result == "works":
        found = find_experts(tiny_model(family))
        experts = ", ".join(sorted({type(each.module).__name__ for each in found}))
        parameters = ", ".join(dict.fromkeys(name for each in found for name in each.adapter.parameters))
        adapters = ", ".join(sorted({_served_by(each.adapter) for each in found}))
    return f"| {family} | {experts} | {parameters} | {adapters} | {result} | {of_slices} |"


def _served_by(adapter: ExpertsAdapter) -> str:
    if type(adapter) in (StackedExperts, NativeExperts):
        return "its structure"
    return f"families/{type(adapter).__module__.rpartition('.')[2]}.py"


def write() -> None:
    torch.set_num_threads(1)
    ranks = RankPool()
    FILE.write_text(
        HEADER
        + "\n".join(row(family, outcome(ranks, family), cp_outcome(ranks, family)) for family in families())
        + "\n"
    )
    ranks.close()


if __name__ == "__main__":
    write()
