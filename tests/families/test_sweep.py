"""Every Mixture-of-Experts family of transformers under expert parallelism, and the table that says so."""

from __future__ import annotations

import pytest

from tests.families.find import families
from tests.families.slices import cp_outcome
from tests.families.sweep import sweep
from tests.families.table import FILE, HEADER, outcome, row
from tests.families.tiny import CANNOT_RUN
from tests.matrix import mostly_in_the_sweep
from tests.pool import RankPool

KINDS = [
    "deepseek_v3",  # the usual form
    "aria_text",  # transposed
    "dbrx",
    "ernie4_5_vl_moe_text",
    "gemma4_text",  # the router beside the MLP
    "gpt_oss",  # biases
    "jetmoe",
    "llama4_text",
    "longcat_flash",
    "muse_spark_text",  # a norm that all experts share
    "nemotron_h",  # no gate
    "openai_privacy_filter",
    "step3p5",  # not decorated
    "zaya",  # tokens without experts
]
"""One family of each kind."""

MAY_BE_REFUSED = {"nllb-moe", "switch_transformers"}


@pytest.mark.parametrize("family", mostly_in_the_sweep(KINDS, "deepseek_v3", "gpt_oss", "longcat_flash"))
@pytest.mark.parametrize("dispatcher", mostly_in_the_sweep(["all_gather", "all_to_all"], "all_to_all"))
def test_a_family_of_each_kind_on_four_ranks(ranks: RankPool, family: str, dispatcher: str) -> None:
    assert ranks.run(sweep, family, 2, dispatcher, world=4)[0] == []


@pytest.mark.sweep
@pytest.mark.parametrize("family", families())
def test_every_family_is_as_the_table_says(ranks: RankPool, family: str) -> None:
    result = outcome(ranks, family)
    assert result == "works" or family in MAY_BE_REFUSED
    of_slices = cp_outcome(ranks, family)
    assert of_slices == "works" or family in CANNOT_RUN or of_slices.startswith("refused: "), of_slices
    assert row(family, result, of_slices) in FILE.read_text().splitlines(), "run `make families`"


def test_the_table_has_every_family_and_no_other() -> None:
    text = FILE.read_text()
    assert text.startswith(HEADER)
    assert [line.split("|")[1].strip() for line in text.removeprefix(HEADER).splitlines()] == families()
