"""Folders with quantised weights, dequantised as they are read: what transformers makes of them, by shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from lightning_moe_ep import LoadReport, build_pretrained, load_pretrained, materialize, parallelize
from tests.checkpoint.test_pretrained import meshes_for, qwen, save, unlike
from tests.pool import RankPool

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4"}


def fp8_folder(folder: Path) -> Path:
    """A Qwen3-MoE with its projections in blocks of FP8."""
    save(folder, qwen())
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = weight
        if "proj" in name:
            rows, columns = weight.shape
            blocks = weight.view(rows // 16, 16, columns // 16, 16)
            scale = blocks.abs().amax((1, 3)) / 448
            tensors[name] = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
    return rewrite(folder, tensors, FP8)


def mxfp4_folder(folder: Path) -> Path:
    """A gpt-oss with its experts in MXFP4."""
    config = AutoConfig.for_model(
        "gpt_oss",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    save(folder, config)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = weight.shape
            groups = (experts, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(256, (*groups, 16), generator=generator, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(120, 124, groups, generator=generator, dtype=torch.uint8)
        else:
            tensors[name] = weight
    return rewrite(folder, tensors, MXFP4)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


FOLDERS = {
    "fp8": (fp8_folder, lambda: FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True)),
    "mxfp4": (mxfp4_folder, lambda: Mxfp4Config(dequantize=True)),
}


def _load(folder: Path, kind: str, dtype: torch.dtype) -> tuple[list[str], bool, LoadReport]:
    right = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=FOLDERS[kind][1]())
    model = build_pretrained(folder, dtype=dtype)
    parallelize(model, meshes_for(2))
    report = load_pretrained(model, folder)
    materialize(model, seed=0, device=torch.device("cpu"))
    same_dtype = all(p.dtype == right.get_parameter(name).dtype for name, p in model.named_parameters())
    return unlike(model, right), same_dtype and not hasattr(model.config, "quantization_config"), report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FOLDERS)
def test_what_transformers_makes_of_it(ranks: RankPool, tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    FOLDERS[kind][0](tmp_path)
    size = sum(t.numel() * t.itemsize for t in load_file(tmp_path / "model.safetensors").values())
    results = ranks.run(_load, tmp_path, kind, dtype, world=2)
    for wrong, plain, report in results:
        assert wrong == []
        assert plain
        assert report.bytes_read <= 1.05 * report.bytes_held
    assert sum(report.bytes_held for *_, report in results) == pytest.approx(size, abs=100)


def test_scales_that_are_missing(tmp_path: Path) -> None:
    fp8_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight_scale_inv"]
    del tensors["model.layers.1.self_attn.q_proj.weight_scale_inv"]
    rewrite(tmp_path, tensors, FP8)
    with pytest.raises(ValueError, match=r"gate_up_proj cannot be made of .* 8 of .*up_proj\.weight, but 7 scales"):
        load_pretrained(build_pretrained(tmp_path), tmp_path)
    tensors = load_file(fp8_folder(tmp_path) / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight_scale_inv"]
    rewrite(tmp_path, tensors, FP8)
    with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.self_attn\.q_proj\.weight is torch\.float8_e4m3fn"):
        load_pretrained(build_pretrained(tmp_path), tmp_path)


def test_other_ways_are_refused(tmp_path: Path) -> None:
    save(tmp_path, qwen())
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors"), {"quant_method": "awq"})
    with pytest.raises(NotImplementedError, match=r"are quantised \(awq\), and of that only fp8 and mxfp4 can be deq"):
        build_pretrained(tmp_path)
