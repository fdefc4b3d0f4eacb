"""The host's memory while a pretrained model is read is at most what the pieces of four threads have."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_moe_ep import CausalLMModule, Layout, load_pretrained
from lightning_moe_ep.checkpoint import safetensors_files
from lightning_moe_ep.planning.shapes import ModelShapes, shapes_of
from lightning_moe_ep.tools.plan.config import configured
from lightning_moe_ep.tools.plan.load import Loading

HIDDEN, EXPERTS, INNER, VOCABULARY = 64, 8, 48, 200


def planned(folder: Path, precision: str) -> tuple[Loading, ModelShapes]:
    module = configured(CausalLMModule(pretrained=str(folder)))
    shapes = shapes_of(module, precision=precision)
    return Loading(module, shapes), shapes


def staged(folder: Path) -> list[int]:
    """Bytes of each buffer that reading the files into a model in bf16 takes."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    sizes: list[int] = []
    empty = torch.empty

    def counting(*args: Any, **kwargs: Any) -> Any:
        made = empty(*args, **kwargs)
        sizes.append(made.nbytes)
        return made

    with patch.object(safetensors_files.torch, "empty", counting):
        load_pretrained(model, folder)
    return sizes


def test_pieces_of_four_threads(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        moe_intermediate_size=INNER,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    alone = Layout(1, 1, 1)
    loading, _ = planned(tmp_path, "bf16-true")
    assert loading
    # In memory of the host already, and of another dtype: each piece is read and then converted.
    assert loading.host_bytes(alone, cpu_offload=True) == sum(sorted(staged(tmp_path))[-4:])
    # On its way to a device, the host converts, too: of embedding and head all rows, of experts one matrix at a time.
    whole, matrix = VOCABULARY * HIDDEN, HIDDEN * INNER
    assert loading.host_bytes(alone) == 2 * whole * (4 + 2) + 2 * max(matrix, HIDDEN * HIDDEN) * (4 + 2)
    # Spread, a rank reads the experts that it has, and a part of the others.
    parts = sorted([whole // 4, whole // 4, *[matrix] * 2])
    assert loading.host_bytes(Layout(1, 1, 4)) == sum(parts) * 6
    assert planned(tmp_path, "32-true")[0].host_bytes(alone, cpu_offload=True) == 0  # straight into the weights


def test_new_models_read_nothing() -> None:
    model = {"model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 1, "num_experts": 4, "vocab_size": 9}
    module = configured(CausalLMModule(config=model))
    assert not Loading(module, shapes_of(module))
