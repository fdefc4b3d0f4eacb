"""Hugging Face folders, read into sharded models: what stock transformers reads, by fewer bytes."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import _build_checkpoint_conversion_mapping

from benchmarks.load import peak_of_memory
from lightning_moe_ep import Layout, LoadReport, build_meshes, build_pretrained, load_pretrained, parallelize
from lightning_moe_ep.checkpoint import full_model_state, pretrained
from lightning_moe_ep.checkpoint.conversions import FOLLOWED
from lightning_moe_ep.initialization import materialize
from tests.families.find import families
from tests.families.multimodal import TOWERS, multimodal_model
from tests.families.tiny import tiny_model
from tests.list_models import MixtralBlock
from tests.matrix import mostly_in_the_sweep, mostly_more
from tests.pool import RankPool

KINDS = ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_vl_moe_text", "longcat_flash", "inkling2_text"]

REFUSED = {"nllb-moe", "switch_transformers"}

READ_WHOLE = {"inkling2_loop_text", "ernie4_5_vl_moe"}
"""Families with tensors that every rank reads whole, as a conversion mixes their first dimension."""

REWRITTEN = "balancing_biases"
"""A tensor of zaya that transformers changes after it has read it."""


def unlike(model: nn.Module, right: nn.Module) -> list[str]:
    """On a rank: the tensors of a sharded model that are not what they are in a plain one."""
    state = full_model_state(model)
    buffers = dict(model.named_buffers())
    wrong = [name for name, buffer in right.named_buffers() if not torch.equal(buffer, buffers[name])]
    if dist.get_rank() == 0:
        wrong += state.keys() ^ right.state_dict().keys()
        wrong += [name for name, value in right.state_dict().items() if not torch.equal(value, state[name])]
    return [name for name in wrong if REWRITTEN not in name]


def meshes_for(ep: int, replicate: int = 1) -> Any:
    return build_meshes(Layout.for_world(dist.get_world_size(), ep=ep, replicate=replicate), "cpu")


def plain_model(family: str) -> nn.Module:
    return multimodal_model(family) if family in TOWERS else tiny_model(family)


def load_family(family: str, folder: Path, ep: int) -> tuple[list[str], LoadReport]:
    """On a rank: what is unlike what transformers reads."""
    plain = plain_model(family)
    with torch.device("meta"):
        model = type(plain)(plain.config)
    parallelize(model, meshes_for(ep))
    report = load_pretrained(model, folder)
    materialize(model, seed=0, device=torch.device("cpu"))
    return unlike(model, type(plain).from_pretrained(folder)), report


@pytest.mark.parametrize("family", mostly_in_the_sweep([*sorted({*families()} - REFUSED), *TOWERS], *KINDS))
def test_a_family_is_read_as_transformers_reads_it(ranks: RankPool, tmp_path: Path, family: str) -> None:
    plain_model(family).save_pretrained(tmp_path, max_shard_size="100KB")
    for wrong, report in ranks.run(load_family, family, tmp_path, 2, world=2):
        assert wrong == []
        assert (report.bytes_read > 1.05 * report.bytes_held) == (family in READ_WHOLE)


def test_what_is_read_whole_is_known() -> None:
    """Operations of transformers that are not followed part by part, and the models that have them."""
    found: dict[str, set[str]] = {}
    for model_type, transforms in _build_checkpoint_conversion_mapping().items():
        for transform in transforms:
            for operation in getattr(transform, "operations", []):
                if type(operation) not in FOLLOWED:
                    found.setdefault(type(operation).__name__, set()).add(model_type)
    assert found == {
        "ErnieFuseAndSplitTextVisionExperts": {"ernie4_5_vl_moe"},  # of the experts
        "Inkling2LoopDequantizeExperts": {"inkling2_loop_text"},  # of the experts
        "Inkling2LoopMergeMessageQueries": {"inkling2_loop_text"},
        "Inkling2UnpadVocab": {"inkling2", "inkling2_loop", "inkling2_loop_text", "inkling2_text"},
        "PermuteForRope": {"gradium_phonon_tts", "kimi_k25", "mistral_large4", "step3p5_vision"},
    }


def qwen(num_experts: int = 8, **options: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        **options,
    )


def save(folder: Path, config: PreTrainedConfig, **options: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder, **options)
    return folder


def load_at(folder: Path, ep: int, replicate: int, dtype: torch.dtype, ahead: bool) -> tuple[list[str], LoadReport]:
    """On a rank: the same for a causal language model; each byte that is read is planned."""
    read: set[tuple[str, int]] = set()
    planned: set[tuple[str, int]] = set()
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        original, needed = pretrained.OpenFiles.read, pretrained.needed_by

        def reading(self: Any, tensor: Any, offset: int, out: Tensor) -> None:
            read.update((tensor.file.name, byte) for byte in range(offset, offset + len(out)))
            original(self, tensor, offset, out)

        def needing(plan: Any, of: int) -> Any:
            spans = list(needed(plan, of))
            if of == rank:
                planned.update((span.file.name, byte) for span in spans for byte in range(span.start, span.stop))
            return spans

        patch.setattr(pretrained.OpenFiles, "read", reading)
        patch.setattr(pretrained, "needed_by", needing)
        model = build_pretrained(folder, dtype=dtype)
        parallelize(model, meshes_for(ep, replicate))
        report = load_pretrained(model, folder, read_ahead=ahead)
        materialize(model, seed=0, device=torch.device("cpu"))
    assert planned == (read if ahead else set())
    return unlike(model, AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)), report


SIZES = [(1, 1, 1, 8), (2, 1, 1, 8), (4, 2, 1, 8), (4, 4, 1, 8), (4, 2, 2, 8), (4, 2, 1, 6), (4, 2, 1, 2), (4, 1, 1, 6)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("world", "ep", "replicate", "num_experts"), mostly_more(SIZES, SIZES[0], SIZES[4], SIZES[5], SIZES[6])
)
def test_layouts(
    ranks: RankPool, tmp_path: Path, world: int, ep: int, replicate: int, num_experts: int, ahead: bool
) -> None:
    save(tmp_path, qwen(num_experts), max_shard_size="150KB")
    size = sum(tensor.numel() * 4 for file in tmp_path.glob("*.safetensors") for tensor in load_file(file).values())
    results = ranks.run(load_at, tmp_path, ep, replicate, torch.float32, ahead, world=world)
    for wrong, report in results:
        assert wrong == []
        assert report.bytes_read <= 1.05 * report.bytes_held
        assert ahead or report.bytes_ahead == 0
    assert sum(report.bytes_held for _, report in results) == size * replicate
    assert sum(report.bytes_ahead for _, report in results) >= size * ahead


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tied", [True, False])
def test_dtypes_and_tied_embeddings(ranks: RankPool, tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    save(tmp_path, qwen(tie_word_embeddings=tied))
    for wrong, report in ranks.run(load_at, tmp_path, 2, 1, dtype, False, world=2):
        assert wrong == []
        assert report.bytes_read == report.bytes_held  # in the dtype of the files


def _tied(folder: Path) -> bool:
    model = build_pretrained(folder)
    parallelize(model, meshes_for(2), pretrained=folder)
    return model.lm_head.weight is model.model.embed_tokens.weight and not any(p.is_meta for p in model.parameters())


def test_tied_embeddings_stay_tied(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path, qwen(tie_word_embeddings=True))
    assert ranks.run(_tied, tmp_path, world=2) == [True, True]


class OldConfig(PreTrainedConfig):
    model_type = "old_mixtral"


class OldMixtral(PreTrainedModel):
    """A model of somebody's own, with its experts in a ModuleList."""

    config_class = OldConfig

    def __init__(self, config: OldConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList([MixtralBlock(8, 2, 48, True) for _ in range(2)])
        self.post_init()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _load_old(folder: Path) -> tuple[list[str], LoadReport]:
    with torch.device("meta"):
        model = OldMixtral(OldConfig())
    parallelize(model, meshes_for(2))
    report = load_pretrained(model, folder)
    return unlike(model, OldMixtral.from_pretrained(folder)), report


def test_experts_in_a_module_list(ranks: RankPool, tmp_path: Path) -> None:
    OldMixtral(OldConfig()).save_pretrained(tmp_path)
    for wrong, report in ranks.run(_load_old, tmp_path, world=4):
        assert wrong == []
        assert report.bytes_read <= 1.05 * report.bytes_held * 2  # one expert whole, of which efsdp=2 keeps a half


def _load_adapted(folder: Path) -> tuple[list[str], int]:
    with torch.device("meta"):
        config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"])
        model = get_peft_model(build_pretrained(folder), config)
    parallelize(model, meshes_for(2), pretrained=folder)
    right = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    state = {name.replace("base_layer.", ""): value for name, value in full_model_state(model).items()}
    wrong = [name for name in right if state and not torch.equal(state[f"base_model.model.{name}"], right[name])]
    return wrong, sum(p.is_meta for p in model.parameters())


def test_a_model_with_adapters(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path, qwen())
    assert ranks.run(_load_adapted, tmp_path, world=2) == [([], 0), ([], 0)]


def _load_whole_parameters(folder: Path) -> tuple[bool, int, int]:
    """Read a model whose norms FSDP2 leaves alone."""
    model = build_pretrained(folder)
    report = load_pretrained(model, folder)  # nothing is sharded: rank 0 reads, all have it
    right = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    same = all(torch.equal(value, right[name]) for name, value in model.state_dict().items())
    return same, report.bytes_read, report.bytes_held


def test_what_is_not_sharded_is_read_once_and_sent(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path, qwen())
    (first, read, held), *others = ranks.run(_load_whole_parameters, tmp_path, world=3)
    assert first and read == held > 0
    assert others == [(True, 0, 0)] * 2


def _peak(folder: Path) -> tuple[int, int, int]:
    model = build_pretrained(folder, dtype=torch.bfloat16)
    parallelize(model, meshes_for(2))
    with peak_of_memory() as peak:
        report = load_pretrained(model, folder)
    layer = sum(p.numel() for p in model.model.layers[0].parameters()) * 2
    return peak[0], report.bytes_held, layer


def test_memory_is_the_share_and_a_layer(ranks: RankPool, tmp_path: Path) -> None:
    config = qwen(num_experts=16)
    config.update({"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 12})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="40MB")
    for peak, held, layer in ranks.run(_peak, tmp_path, world=2):
        assert held > 60 * 2**20
        assert peak <= held + layer


# What is wrong is said, on every rank, before a weight is changed.


def damage(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _names(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    tensors["model.layers.0.extra.weight"] = torch.zeros(2)
    tensors["lm_head.weight"] = torch.zeros(3, 64)


def _dtype(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)


def _cut_short(folder: Path) -> None:
    file = next(iter(sorted(folder.glob("model-00002*"))))
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 100)


def _header(folder: Path) -> None:
    with next(iter(sorted(folder.glob("model-00002*")))).open("r+b") as opened:
        opened.seek(8)
        opened.write(b"no json!")


def _lost_file(folder: Path) -> None:
    next(iter(sorted(folder.glob("model-00002*")))).unlink()


def _index(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        file = folder / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        change(index)
        file.write_text(json.dumps(index))

    return act


def _pickle(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (folder / "config.json").write_text(json.dumps(config))


WRONG: dict[str, tuple[Callable[[Path], Any], bool, list[str]]] = {
    "names and shapes": (
        lambda folder: damage(folder, _names),
        False,
        [
            "does not fit Qwen3MoeForCausalLM:",
            r"missing: model\.norm\.weight",
            r"unexpected: model\.layers\.0\.extra\.weight",
            r"mis-shaped: lm_head\.weight is \[3, 64\] in the files, \[64, 64\] in the model",
            r"model\.layers\.1\.mlp\.experts\.gate_up_proj cannot be made of .*gate_proj.*: tensors of shapes",
        ],
    ),
    "dtype": (
        lambda folder: damage(folder, _dtype),
        False,
        [r"model\.safetensors: tensor model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight is torch\.int8, but .*32"],
    ),
    "cut short": (_cut_short, True, [r"model-00002-of-\d+\.safetensors \(tensor .* should be there\) is cut short or"]),
    "header": (_header, True, [r"model-00002-of-\d+\.safetensors \(tensor .*\) is cut short or damaged"]),
    "lost file": (
        _lost_file,
        True,
        [r"model-00002-of-\d+\.safetensors, in which .*index\.json has tensor .*, does not"],
    ),
    "index names too much": (
        _index(lambda index: index["weight_map"].update(nothing=index["weight_map"]["lm_head.weight"])),
        True,
        [r"model-\d+-of-\d+\.safetensors has no tensor nothing, which model\.safetensors\.index\.json has there"],
    ),
    "index leads out": (
        _index(lambda index: index["weight_map"].update(nothing="../model.safetensors")),
        True,
        [r"has tensor nothing in '\.\./model\.safetensors', which is not a file of its folder"],
    ),
    "no index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
        True,
        [r"index\.json is no index of safetensors files"],
    ),
    "pickle": (_pickle, False, [r"has neither model\.safetensors nor .*; pytorch_model\.bin may hold anything"]),
    "nothing": (lambda folder: (folder / "model.safetensors").unlink(), False, [r"has neither model\.safetensors nor"]),
    "no config": (lambda folder: (folder / "config.json").unlink(), False, [r"has no config\.json"]),
    "quantised": (_quantized, False, [r"are quantised \(awq\), and of that only fp8 and mxfp4 can"]),
}


def _fails(folder: Path, only: int | None = None) -> tuple[str, bool]:
    """On a rank: the error, and whether the model is as it was."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(qwen())
    parallelize(model, meshes_for(2))
    if only is not None and dist.get_rank() != only:
        folder = folder.with_name("good")
    with pytest.raises(Exception) as raised:
        load_pretrained(model, folder)
    return str(raised.value), all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("only", mostly_more([None, 1], None))
def test_what_is_wrong_is_said_on_every_rank(ranks: RankPool, tmp_path: Path, case: str, only: int | None) -> None:
    change, sharded, messages = WRONG[case]
    save(tmp_path / "good", qwen(), **({"max_shard_size": "150KB"} if sharded else {}))
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    change(tmp_path / "bad")
    for error, untouched in ranks.run(_fails, tmp_path / "bad", only, world=2):
        assert untouched
        for message in messages:
            assert re.search(message, error), error


def _unreadable(folder: Path) -> str:
    """On a rank: the error where the second rank's disk fails in the midst of reading."""
    model = build_pretrained(folder)
    parallelize(model, meshes_for(2))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:

            def preadv(*_: Any) -> int:
                raise OSError(5, "Input/output error")

            patch.setattr(os, "preadv", preadv)
        with pytest.raises(ValueError) as raised:
            load_pretrained(model, folder)
    return str(raised.value)


def test_a_disk_that_fails_on_one_rank_stops_all(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path, qwen())
    one, other = ranks.run(_unreadable, tmp_path, world=2)
    assert one == other
    assert "model.safetensors could not be read at tensor" in one


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    """As in transformers: the index is left from an earlier save."""
    save(tmp_path, qwen(), max_shard_size="150KB")
    save(tmp_path, qwen())
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = build_pretrained(tmp_path)
    load_pretrained(model, tmp_path)
    right = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(p, right.get_parameter(name)) for name, p in model.named_parameters())


def test_what_need_not_match(tmp_path: Path) -> None:
    save(tmp_path, qwen())
    damage(tmp_path, lambda tensors: tensors.update(more=torch.zeros(1)) or tensors.pop("lm_head.weight"))
    model = build_pretrained(tmp_path)
    load_pretrained(model, tmp_path, strict=False)
    assert [name for name, p in model.named_parameters() if p.is_meta] == ["lm_head.weight"]


def test_one_model_is_filled() -> None:
    with pytest.raises(ValueError, match=r"in ModuleList there are 2 of transformers \['0', '1'\]"):
        load_pretrained(nn.ModuleList([OldMixtral(OldConfig()), OldMixtral(OldConfig())]), ".")


def test_building_from_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="pretrained='nowhere' is neither"):
        build_pretrained("nowhere")
