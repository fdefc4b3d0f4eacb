"""The load-balancing loss of each family is the one that cp groups, and aux_loss="global", have in its place."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from lightning_moe_ep import load_balancing_loss
from tests.families.find import families
from tests.families.tiny import CANNOT_RUN, tiny_config

pytestmark = pytest.mark.sweep

HAVE_NONE = {"afmoe", "hunyuan_v1_moe", "deepseek_v3", "glm4_moe", "llama4_text", "solar_open"}
"""Some of those whose models return none."""


def test_it_is_transformers() -> None:
    compared = set()
    for family in families():
        config = tiny_config(family) if family not in CANNOT_RUN else None
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            continue
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if "output_router_logits" not in inspect.signature(model_class.forward).parameters:
            continue
        torch.manual_seed(0)
        model = model_class(config).eval()
        ids, mask = torch.randint(3, 60, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
        mask[1, 5:] = 0
        with torch.no_grad():
            output = model(input_ids=ids, attention_mask=mask, use_cache=False, output_router_logits=True)
        if getattr(output, "aux_loss", None) is None:
            continue
        ours = load_balancing_loss(output.router_logits, model.num_experts, model.num_experts_per_tok, mask)
        assert float(ours) == pytest.approx(float(output.aux_loss), rel=1e-5), family
        compared.add(family)
    assert {"qwen3_moe", "mixtral", "gpt_oss", "olmoe", "granitemoe", "jamba"} <= compared
    assert not compared & HAVE_NONE
