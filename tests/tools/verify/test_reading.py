"""What `verify` reads, and what it refuses before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import lightning_moe_ep.tools.verify.memory as memory
from lightning_moe_ep import MoEEPStrategy, verify
from lightning_moe_ep.cli.main import main
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.tools.verify.given import keep_fp32_kernels
from lightning_moe_ep.tools.verify.measure import other_ep
from lightning_moe_ep.tools.verify.reading import read, smaller
from tests.cli.processes import QUICKSTART
from tests.tools.verify.test_cutting import SMALL

CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
}


def test_smaller_sizes() -> None:
    made, told = smaller(CONFIG, experts=4, width=64)
    assert made == {
        **CONFIG,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
    }
    assert told[:3] == ["n_routed_experts=4, not 64", "num_experts_per_tok=4, not 8", "n_group=1"]
    assert "hidden_size=64, not 256" in told and CONFIG["n_group"] == 8
    with pytest.raises(ValueError, match="--experts 65 is more than the model's n_routed_experts=64; give at most"):
        smaller(CONFIG, experts=65, width=None)
    with pytest.raises(ValueError, match="the configuration of llama has no number of experts that is known"):
        smaller({"model_type": "llama"}, experts=4, width=None)


@pytest.mark.parametrize(
    ("world", "ep", "replicate", "experts", "other"),
    [
        (4, 2, 1, 8, 4),
        (6, 2, 1, 12, 6),
        (6, 2, 1, 8, 1),
        (4, 4, 1, 8, 2),
        (2, 2, 1, 8, 1),
        (4, 2, 2, 8, 1),
        (1, 1, 1, 8, 1),
    ],
)
def test_the_layout_of_the_resume(world: int, ep: int, replicate: int, experts: int, other: int) -> None:
    assert other_ep(Layout.for_world(world, ep=ep, replicate=replicate), {"a": experts}) == other


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--experts", "9"], "error: --experts 9 is more than the model's num_experts=8; give at most that"),
        (["--layers", "0"], "error: --layers is 0, but must be at least 1"),
        (
            ["--trainer.strategy=ddp"],
            "error: trainer.strategy is DDPStrategy; verify is for runs with MoEEP",
        ),
    ],
)
def test_what_is_refused_at_once(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["verify", "--config", str(QUICKSTART), *options])
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (2, "") and words in printed.err


def test_sizes_of_another_module_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model=tests.tools.verify.planted.Regression", "--data=lightning_moe_ep.TextDataModule"]
    with pytest.raises(SystemExit) as end:
        main(["verify", *given, "--trainer.strategy=moe_ep_1", "--trainer.accelerator=cpu", "--width=8"])
    told = capsys.readouterr().err
    assert end.value.code == 2 and "error: --width is for CausalLMModule" in told and "Regression smaller sizes" in told


def test_a_rank_does_not_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(RuntimeError, match="under torchrun use the command"):
        verify("run.yaml")


def test_kernels_that_take_no_fp32_are_left_out() -> None:
    strategy = MoEEPStrategy()
    strategy.parallelize_options["kernels"] = ["flash_attention_2", "liger", "kernels-community/flash-attn2"]
    told = "left out of kernels, as they take no fp32: flash_attention_2, kernels-community/flash-attn2"
    assert keep_fp32_kernels(strategy) == [told]
    assert strategy.parallelize_options["kernels"] == ["liger"] and keep_fp32_kernels(strategy) == []


def test_memory_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available", lambda: 2**20)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda told, mine: told.__setitem__(0, mine))
    layout = Layout.for_world(1, ep=1)
    with torch.device("meta"):
        fits, does_not = nn.Linear(64, 64), nn.Linear(1024, 1024)
    memory.check_memory(fits, layout, torch.device("cpu"), ranks_on_node=1)
    words = r"has 1,049,600 parameters, and comparing it needs 0\.12 GiB of the host's memory, where 0\.00 GiB are av"
    with pytest.raises(ValueError, match=words):
        memory.check_memory(does_not, layout, torch.device("cpu"), ranks_on_node=1)


OF_DATA = ["--data.max_bytes=200000", "--data.block_size=64", "--trainer.precision=bf16-mixed"]


def test_the_command(tmp_path: Path) -> None:
    """The function runs the command as it is typed, and reads what it prints."""
    strategy = ["--trainer.strategy=tests.tools.verify.planted.NotAveraged", "--trainer.strategy.ep=2"]
    strategy.append("--seed_everything=true")  # as where a configuration has none
    report = verify(QUICKSTART, *strategy, f"--data.cache_dir={tmp_path}", *OF_DATA, layers=2, width=64)
    assert [fault.name for fault in report.faults] == ["experts-not-averaged"] and not report.right
    assert "fp32 in place of precision=bf16-mixed" in report.changes and "hidden_size=64, not 128" in report.changes
    assert report.seconds < 60
    assert type(report).from_json(json.dumps(report.as_dict())) == report


@pytest.mark.more
def test_a_pretrained_model_is_verified_with_new_weights(tmp_path: Path) -> None:
    config = {**SMALL, "num_hidden_layers": 3, "num_experts": 8, "moe_intermediate_size": 32, "vocab_size": 256}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **config)).save_pretrained(tmp_path / "model")
    model = ["--model.config=null", f"--model.pretrained={tmp_path / 'model'}"]
    given = read(["--config", str(QUICKSTART), *model], experts=4, width=32)
    unread = f"{tmp_path / 'model'} is not read: the weights are new"
    assert given.changes[:2] == [unread, "num_local_experts=4, not 8"] and "hidden_size=32, not 64" in given.changes
    report = verify(QUICKSTART, *model, f"--data.cache_dir={tmp_path / 'data'}", *OF_DATA)
    assert report.right, report.text()
    assert unread in report.changes and "model.model.layers: 1 of 3 blocks (0) are kept" in report.changes
