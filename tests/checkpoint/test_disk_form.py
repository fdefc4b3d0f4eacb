"""What a family has on disk, converted an expert at a time, is what transformers' own `save_pretrained` writes."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from lightning_moe_ep import export_to_hugging_face
from lightning_moe_ep.checkpoint.disk_form import _apart, plan_groups
from tests.checkpoint.exported import family_model
from tests.checkpoint.test_export import files_of, same
from tests.families.find import families
from tests.families.multimodal import TOWERS
from tests.families.tiny import tiny_model


def checkpoint_of(model: nn.Module, path: Path) -> None:
    """What the strategy would save, in one file, of a module that holds the model."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    torch.save(
        {
            "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()},
            "moe_ep": {"models": {"model": {"class": type(model).__name__, "config": config}}},
        },
        path,
    )


def check_as_transformers_writes(model: nn.Module, folder: Path) -> None:
    checkpoint_of(model, folder / "c.ckpt")
    model.save_pretrained(folder / "theirs")
    for memory in ("1kB", "20kB", "4GiB"):  # an expert, some, all at a time
        export_to_hugging_face(folder / "c.ckpt", folder / memory, max_memory=memory)
        assert same(files_of(folder / memory), files_of(folder / "theirs"))
    assert json.loads((folder / "1kB" / "config.json").read_text()) == json.loads(
        (folder / "theirs" / "config.json").read_text()
    )


@pytest.mark.sweep
@pytest.mark.parametrize("family", families())
def test_every_family(tmp_path: Path, family: str) -> None:
    check_as_transformers_writes(tiny_model(family), tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("family", [f for f in families() if CONFIG_MAPPING[f] in MODEL_FOR_CAUSAL_LM_MAPPING])
def test_every_family_with_a_head(tmp_path: Path, family: str) -> None:
    check_as_transformers_writes(family_model(family), tmp_path)


@pytest.mark.parametrize("family", [*TOWERS, "inkling2_loop_text", "bailing_hybrid"])
def test_odd_ones(tmp_path: Path, family: str) -> None:
    """Several towers; rows of a vocabulary that is padded on disk; one tensor of several."""
    check_as_transformers_writes(family_model(family) if family in TOWERS else tiny_model(family), tmp_path)


def test_how_groups_are_converted() -> None:
    config = MixtralConfig(
        vocab_size=8, hidden_size=8, intermediate_size=4, num_hidden_layers=1, num_local_experts=4,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    groups = plan_groups(model, dict.fromkeys(model.state_dict(), torch.float32))
    apart = {next(iter(group.sources)): group for group in groups if not group.is_as_it_is}
    up, down = (apart[f"model.layers.0.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
    assert len(apart) == 2 and up.apart and down.apart and up.rows == down.rows == 4
    prefix = "model.layers.0.block_sparse_moe.experts"
    assert list(up.targets) == [f"{prefix}.{expert}.{name}.weight" for name in ("w1", "w3") for expert in range(4)]
    assert list(down.targets) == [f"{prefix}.{expert}.w2.weight" for expert in range(4)]
    names = [name for group in groups for name in group.sources]
    assert sorted(names) == sorted(model.state_dict())


def test_what_is_not_row_by_row_is_converted_whole(tmp_path: Path) -> None:
    """A conversion whose names do not count the experts is not trusted to go by rows."""
    model = family_model("mixtral")
    with patch("lightning_moe_ep.checkpoint.disk_form._apart", return_value=None):
        groups = plan_groups(
            AutoModelForCausalLM.from_config(model.config).to("meta"),
            dict.fromkeys(model.state_dict(), torch.float32),
        )
        assert {group.rows for group in groups} == {0}
        check_as_transformers_writes(model, tmp_path)


def test_numbers_in_names() -> None:
    assert _apart("a.0.b", "a.0.b") == 0
    assert _apart("a.0.b.1", "a.0.b.12") == 11
    assert _apart("a.0.b.1", "a.1.b.2") is None
    assert _apart("a.0.b", "a.0.c") is None
    assert _apart("a.0.b", "a.b") is None
