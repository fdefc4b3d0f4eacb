"""Every file in configs/: parsed by the command, and the large model sharded without its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.processes import REPOSITORY, run_python

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
QWEN3_30B_A3B = REPOSITORY / "configs" / "qwen3_30b_a3b.yaml"

# Runs in a process of its own: the fake process group must not stay behind. Prints, for the last rank, which holds the
# least if anything is cut unevenly, the parameters it holds, and those of the whole model.
SHARD = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from lightning_moe_ep import Layout, build_meshes, parallelize
from lightning_moe_ep.cli.main import MoECLI
import lightning.pytorch as L

world, rank, config = 8, 7, sys.argv[1]
cli = MoECLI(
    L.LightningModule,
    L.LightningDataModule,
    subclass_mode_model=True,
    subclass_mode_data=True,
    run=False,
    auto_configure_optimizers=False,
    save_config_callback=None,
    args=["--config", config, "--trainer.accelerator", "cpu", "--trainer.devices", str(world)],
)
strategy = cli.trainer.strategy
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
cli.model.trainer = cli.trainer
with torch.device("meta"):
    cli.model.configure_model()
assert all(parameter.is_meta for parameter in cli.model.parameters())
whole = {name: parameter.numel() for name, parameter in cli.model.model.named_parameters()}
meshes = build_meshes(Layout.for_world(world, ep=strategy.ep, replicate=strategy.replicate), "cpu")
parallelize(cli.model.model, meshes, **strategy.parallelize_options)
here = {name: parameter.to_local().numel() for name, parameter in cli.model.model.named_parameters()}
print("RESULT" + json.dumps({"ep": strategy.ep, "whole": whole, "here": here, "precision": cli.trainer.precision}))
"""


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_every_config_says_how_to_run_it_and_where_it_writes(config: Path) -> None:
    text = config.read_text()
    assert text.startswith("# ")
    parsed = yaml.safe_load(text)
    assert parsed["trainer"]["default_root_dir"] == f"runs/{config.stem}"
    assert parsed["trainer"]["logger"]["init_args"]["save_dir"] == f"runs/{config.stem}"
    assert parsed["data"]["init_args"]["cache_dir"] == f"runs/{config.stem}/data"


def test_every_config_is_run_by_a_test() -> None:
    """The quickstart in test_cli.py and test_two_nodes.py, the large one below."""
    assert [config.stem for config in CONFIGS] == ["quickstart", "qwen3_30b_a3b"]


def test_qwen3_30b_a3b_on_eight_ranks(tmp_path: Path) -> None:
    (printed,) = run_python(["-c", SHARD, str(QWEN3_30B_A3B)], cwd=tmp_path)
    result = json.loads(printed[printed.index("RESULT") + len("RESULT") :])
    config = yaml.safe_load(QWEN3_30B_A3B.read_text())["model"]["init_args"]["config"]

    hidden, head, layers = config["hidden_size"], config["head_dim"], config["num_hidden_layers"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    expert = 3 * hidden * config["moe_intermediate_size"]
    experts = layers * config["num_experts"] * expert
    attention = hidden * (queries + 2 * keys) + queries * hidden + 2 * head
    router = hidden * config["num_experts"]
    dense = 2 * config["vocab_size"] * hidden + layers * (attention + router + 2 * hidden) + hidden
    assert sum(result["whole"].values()) == experts + dense
    assert experts + dense == pytest.approx(30.5e9, rel=0.01)  # what the model's name says

    here = {name for name in result["here"] if ".experts." in name}
    assert result["ep"] == 8
    assert sum(result["here"][name] for name in here) == experts // 8
    # Every dense weight's first dimension divides by 8 ranks.
    assert sum(count for name, count in result["here"].items() if name not in here) == dense // 8
    assert result["precision"] == "bf16-true"
