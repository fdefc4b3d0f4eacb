"""A LoRA adapter goes to plain PEFT and comes from it; what PEFT does to a whole model is done right, or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lightning_moe_ep import (
    CausalLMModule,
    Layout,
    MoEEPStrategy,
    build_meshes,
    merged_model,
    parallelize,
    save_adapter,
)
from tests.cli.processes import REPOSITORY
from tests.matrix import mostly_more
from tests.models import build, make_batch
from tests.parity import Probe, trainer, worst
from tests.pool import RankPool
from tests.test_causal_lm import CONFIG, Batches

LORA: dict[str, Any] = {
    "r": 3,
    "lora_alpha": 7,
    "init_lora_weights": False,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}

LAYOUTS = [(2, 1), (2, 2), (4, 2)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    build("qwen3_moe").save_pretrained(folder)
    return folder


def load_base(base: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)


def wrapped(base: Path, **changes: Any) -> PeftModel:
    """The model with two adapters, of random values that are the same in every process."""
    torch.manual_seed(0)
    model = get_peft_model(load_base(base), LoraConfig(**{**LORA, **changes}))
    model.add_adapter("other", LoraConfig(**{**LORA, **changes, "r": 2}))
    return model


def parallel(model: nn.Module, ep: int) -> nn.Module:
    parallelize(model, build_meshes(Layout.for_world(dist.get_world_size(), ep=ep), "cpu"))
    return model


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(**make_batch("qwen3_moe", 32, seed=0), use_cache=False).logits


def error_of(ours: Tensor, right: Tensor) -> float:
    return float((ours - right).abs().max() / right.abs().max())


def _save(base: Path, folder: Path, ep: int, by_peft: bool) -> None:
    model = parallel(wrapped(base), ep)
    logits_of(model)  # after it the root's weights are gathered
    if by_peft:
        model.save_pretrained(folder)
    else:
        save_adapter(model, folder, selected_adapters=["other"])


@pytest.mark.parametrize(("world", "ep"), mostly_more(LAYOUTS, (4, 2)))
def test_what_is_saved_is_what_peft_would_save(
    ranks: RankPool, base: Path, tmp_path: Path, world: int, ep: int
) -> None:
    ranks.run(_save, base, tmp_path / "ours", ep, True, world=world)
    plain = wrapped(base)
    plain.save_pretrained(tmp_path / "right")
    files = {path.relative_to(tmp_path / "right") for path in (tmp_path / "right").rglob("*")}
    assert {path.relative_to(tmp_path / "ours") for path in (tmp_path / "ours").rglob("*")} == files
    for name in (".", "other"):
        ours, right = (load_file(tmp_path / by / name / "adapter_model.safetensors") for by in ("ours", "right"))
        assert len(right) == 16 and ours.keys() == right.keys()
        assert all(torch.equal(ours[key], right[key]) for key in right)
    loaded = PeftModel.from_pretrained(load_base(base), tmp_path / "ours")
    assert error_of(logits_of(loaded), logits_of(plain)) < 1e-6
    assert error_of(logits_of(loaded), logits_of(load_base(base))) > 0.1


def test_one_of_several_adapters(ranks: RankPool, base: Path, tmp_path: Path) -> None:
    ranks.run(_save, base, tmp_path, 2, False, world=2)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["other"]
    plain = wrapped(base)
    plain.set_adapter("other")
    loaded = PeftModel.from_pretrained(load_base(base), tmp_path / "other")
    assert error_of(logits_of(loaded), logits_of(plain)) < 1e-6


def _load(base: Path, folder: Path, ep: int) -> Tensor:
    return logits_of(parallel(PeftModel.from_pretrained(load_base(base), folder), ep))


@pytest.mark.parametrize(("world", "ep"), mostly_more(LAYOUTS, (4, 2)))
def test_an_adapter_of_plain_peft_goes_on(ranks: RankPool, base: Path, tmp_path: Path, world: int, ep: int) -> None:
    plain = wrapped(base)
    plain.save_pretrained(tmp_path)
    for logits in ranks.run(_load, base, tmp_path, ep, world=world):
        assert error_of(logits, logits_of(plain)) < 1e-5


def _also_saved(active: list[str]) -> dict[str, Any]:
    return {"modules_to_save": ["lm_head"]} if len(active) == 1 else {}  # of which PEFT knows one at a time


def _merge(base: Path, folder: Path, ep: int, active: list[str]) -> tuple[Tensor, Tensor, bool]:
    """On a rank: the logits before and after merging, and whether there was a merged model."""
    model = parallel(wrapped(base, **_also_saved(active)), ep)
    model.base_model.set_adapter(active)
    before = logits_of(model)
    merged = merged_model(model)
    if merged is not None:
        merged.save_pretrained(folder)
        assert error_of(logits_of(merged), before) < 1e-5
    return before, logits_of(model), merged is not None


@pytest.mark.parametrize("active", [["default"], ["default", "other"]], ids="-".join)
@pytest.mark.parametrize(("world", "ep"), mostly_more(LAYOUTS, (4, 2)))
def test_merging(ranks: RankPool, base: Path, tmp_path: Path, world: int, ep: int, active: list[str]) -> None:
    results = ranks.run(_merge, base, tmp_path / "ours", ep, active, world=world)
    assert [there for *_, there in results] == [True, *[False] * (world - 1)]
    assert all(torch.equal(before, after) for before, after, _ in results)
    plain = wrapped(base, **_also_saved(active))
    plain.base_model.set_adapter(active)
    plain = plain.merge_and_unload()
    ours = load_base(tmp_path / "ours")
    error, name = worst(ours.state_dict(), plain.state_dict())
    assert error < 1e-6, f"{name} is off by {error:.1e}"
    assert error_of(logits_of(ours), results[0][0]) < 1e-5


def _refused(base: Path) -> dict[str, str]:
    model = parallel(wrapped(base), 2)
    calls = {
        "merge_and_unload": lambda: model.merge_and_unload(),
        "merge_adapter": lambda: model.merge_adapter(["other"]),
        "unload": lambda: model.unload(),
        "add_adapter": lambda: model.add_adapter("third", LoraConfig(**LORA)),
        "load_adapter": lambda: model.load_adapter("somewhere", "third"),
        "delete_adapter": lambda: model.delete_adapter("other"),
        "unknown": lambda: save_adapter(model, "nowhere", selected_adapters=["third"]),
        "not PEFT": lambda: save_adapter(model.get_base_model(), "nowhere"),
        "batches of several": lambda: model(**make_batch("qwen3_moe", 8, seed=0), adapter_names=["default"]),
    }
    told = {}
    model.eval()
    for name, call in calls.items():
        with pytest.raises((RuntimeError, ValueError, TypeError)) as error:
            call()
        told[name] = str(error.value)
    return told


def test_what_is_refused(ranks: RankPool, base: Path) -> None:
    late = "is not possible once a model is sharded over ranks;"
    merged = f"{late} to get the merged model, call lightning_moe_ep.merged_model(model) on all ranks"
    before = f"{late} do it before the model is parallelized"
    for told in ranks.run(_refused, base, world=2):
        assert told == {
            "merge_and_unload": f"merge_and_unload {merged}",
            "merge_adapter": f"merge_adapter {merged}",
            "unload": f"unload {merged}",
            "add_adapter": f"add_adapter {before}",
            "load_adapter": f"load_adapter {before}",
            "delete_adapter": f"delete_adapter {before}",
            "unknown": "no adapter is named 'third'; use some of ['default', 'other']",
            "not PEFT": "Qwen3MoeForCausalLM is not a PeftModel; pass what get_peft_model returned",
            "batches of several": "adapters on expert weights do not know batches of several adapters (adapter_names)",
        }


def _merge_own() -> str:
    model = parallel(build("own", lora={**LORA, "target_modules": ["head"]}), 2)
    with pytest.raises(TypeError) as error:
        merged_model(model)
    return str(error.value)


def test_a_model_that_is_not_of_transformers(ranks: RankPool) -> None:
    for told in ranks.run(_merge_own, world=2):
        assert told.startswith("OwnModel cannot be built anew from a configuration, as it is not a PreTrainedModel; ")


def from_readme(folder: Path) -> type[CausalLMModule]:
    """The module that the README shows, saving to another folder."""
    (code,) = re.findall(r"```python\n(from peft.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert '"adapter"' in code
    names: dict[str, Any] = {}
    exec(code.replace('"adapter"', repr(str(folder))), names)
    return names["LoraModule"]


def _fit(options: dict[str, Any], ep: int, folder: Path) -> tuple[dict[str, Tensor], set[str], set[str], Tensor]:
    """On a rank: the initial weights, what has a gradient, what the optimizer has, and the trained model's logits."""
    torch.manual_seed(dist.get_rank())
    module, probe = from_readme(folder)(**options), Probe()
    fitted = trainer(MoEEPStrategy(ep=ep), max_steps=2, callbacks=[probe])
    fitted.fit(module, Batches((((1, 0), (2, 0)),) * 4))
    names = {id(parameter): name for name, parameter in module.model.named_parameters()}
    optimized = {names[id(p)] for group in fitted.optimizers[0].param_groups for p in group["params"]}
    return probe.initial, set(probe.gradients[0]), optimized, logits_of(module.model)


@pytest.mark.parametrize("source", ["config", "pretrained"])
@pytest.mark.parametrize(("world", "ep"), mostly_more(LAYOUTS, (4, 2)))
def test_a_module_that_wraps_its_model(
    ranks: RankPool, base: Path, tmp_path: Path, world: int, ep: int, source: str
) -> None:
    options = {"config": CONFIG, "aux_loss": "global"} if source == "config" else {"pretrained": str(base)}
    results = ranks.run(_fit, options, ep, tmp_path, world=world)
    initial = results[0][0]
    adapters = {name for name in initial if "lora_" in name}
    assert len(adapters) == 16
    for weights, with_gradient, optimized, logits in results:
        assert with_gradient == optimized == adapters
        assert all(torch.equal(weights[name], initial[name]) for name in initial)
        assert torch.equal(logits, results[0][3])
    weights = {name.removeprefix("base_model.model."): value for name, value in initial.items() if name not in adapters}
    plain = build("qwen3_moe")
    plain.load_state_dict({name.replace(".base_layer", ""): value for name, value in weights.items()})
    trained = PeftModel.from_pretrained(plain, tmp_path)
    assert error_of(logits_of(trained), results[0][3]) < 1e-5
    assert error_of(logits_of(trained.unload()), results[0][3]) > 1e-4
