"""Kernels by name take effect or are refused; in place of packages that need a GPU stand some of their form."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from lightning_moe_ep import CausalLMModule, MoEEPStrategy, SharedExpert, parallelize
from lightning_moe_ep.kernels import apply_kernels, has_fused_loss
from tests.contract import contract
from tests.families.tiny import loss_of as loss_of_family
from tests.families.tiny import tiny_batch, tiny_model
from tests.models import build
from tests.parity import Case, CaseModule, check, trainer
from tests.pool import RankPool


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (
            ["flash"],
            ValueError,
            r"kernels has 'flash', which is not known; use an attention \(eager, flash_attention_2",
        ),
        (["sdpa", "eager"], ValueError, "kernels has 'sdpa' and 'eager', two for the same thing"),
        (["experts:eager", "batched_mm"], ValueError, "two for the same thing"),
        (["deepgemm"], ValueError, "no backward"),
        (["experts:sdpa"], ValueError, "not known"),
        (["fla:48"], ValueError, r"chunks of one of \(16, 32, 64\) tokens"),
        ("sdpa", TypeError, r"must be a list of names, such as \['sdpa'\]"),
        (None, TypeError, r"kernels=None must be a list of names"),
        ([None], TypeError, r"kernels=\[None\] must be a list of names"),
        (["liger"], ImportError, "`pip install liger-kernel`"),
        (["fla:32"], ImportError, "`pip install flash-linear-attention`"),
        (["flash_attention_2"], ImportError, r"`pip install flash-attn --no-build-isolation` or"),
        (["flash_attention_3"], ImportError, "`pip install kernels`"),
        (["flash_attention_4"], ImportError, "`pip install kernels`"),
        (["kernels-community/flash-attn2"], ImportError, "`pip install kernels`"),
        (["sonicmoe"], ImportError, "`pip install kernels`"),
    ],
)
def test_names_are_checked_before_there_is_a_run(names: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MoEEPStrategy(kernels=names)


def test_an_experts_implementation_goes_with_their_own_forward() -> None:
    assert MoEEPStrategy(kernels=["batched_mm"]).parallelize_options["computation"] == "native"
    assert MoEEPStrategy(kernels=["sdpa"]).parallelize_options["computation"] == "auto"
    with pytest.raises(ValueError, match="'batched_mm', which computation='loop' would take the place of"):
        MoEEPStrategy(kernels=["batched_mm"], computation="loop")


def _trained(folder: Path) -> tuple[Any, ...]:
    """On a rank: what a run with kernels computed with, said, and wrote."""
    calls: list[int] = []

    def counted(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        calls.append(module.num_experts)
        return batched_mm_experts_forward(module, hidden, index, weights)

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.addHandler(handler)
    ALL_EXPERTS_FUNCTIONS["batched_mm"] = counted
    try:
        module = CaseModule(Case(kind="qwen3_moe"))
        module.save_hyperparameters({"mine": 3})
        logger = CSVLogger(folder, version=0)
        trainer(MoEEPStrategy(ep=2, kernels=["eager", "batched_mm"]), max_steps=1, logger=logger).fit(module)
        for options, told in (
            ({"kernels": ["sdpa"]}, r"with kernels=\['eager', 'batched_mm'\], but this strategy has \['sdpa'\]"),
            ({"keep_router_logits": True}, "with keep_router_logits=False, but this strategy has True"),
            ({"router_dtype": "float32"}, r"with fp32_modules=\[\], but this strategy has \['<routers>'\]"),
        ):
            with pytest.raises(ValueError, match=told):  # it is too late for them
                trainer(MoEEPStrategy(ep=2, **options), max_steps=1).fit(module)
    finally:
        log.removeHandler(handler)
        ALL_EXPERTS_FUNCTIONS["batched_mm"] = batched_mm_experts_forward
    config = module.model.config
    written = (
        yaml.safe_load((folder / "lightning_logs/version_0/hparams.yaml").read_text()) if not dist.get_rank() else {}
    )
    return config._attn_implementation, set(calls), written, [line for line in lines if line.startswith("Kernels")]


@contract("Loggers", "`log_hyperparams`", "works; the kernels that were chosen are among the hyperparameters")
def test_what_is_chosen_is_used_and_told_once(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(_trained, tmp_path, world=2)
    assert first[:2] == second[:2] == ("eager", {4})
    assert first[2] == {"mine": 3, "kernels": ["eager", "batched_mm"]}
    assert first[3] == [
        "Kernels: eager (attention of Qwen3MoeForCausalLM), batched_mm (experts of Qwen3MoeForCausalLM, which compute"
        " by their own forward)"
    ]


@pytest.mark.parametrize("names", [["eager", "experts:eager"], ["sdpa", "grouped_mm"]])
@pytest.mark.more
def test_the_numbers_are_those_of_one_process(ranks: RankPool, names: list[str]) -> None:
    check(ranks, Case(kind="qwen3_moe", strategy={"kernels": names}))


def test_what_a_model_or_a_device_cannot_have_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'sdpa', which GptOssModel cannot have; use one of \['eager'\]\. transformers"
    ):
        apply_kernels(tiny_model("gpt_oss"), ["sdpa"], device_type="cpu")
    model = build("qwen3_moe")
    with pytest.raises(
        ValueError, match=r"'flex_attention', which does not train on a CPU; use one of \['eager', 'sdpa'\]"
    ):
        apply_kernels(model, ["flex_attention"], device_type="cpu")
    apply_kernels(model, ["flex_attention"], device_type="cuda")
    assert model.config._attn_implementation == "flex_attention"
    with pytest.raises(ValueError, match="put into models of transformers, but SharedExpert holds none"):
        apply_kernels(SharedExpert(4, 4), ["sdpa"], device_type="cpu")
    with pytest.raises(ValueError, match="the experts of DbrxModel compute in one way only"):
        apply_kernels(tiny_model("dbrx"), ["batched_mm"], device_type="cpu")
    whole: Any = SimpleNamespace()  # refused before anything is asked of the meshes
    with pytest.raises(ValueError, match="kernels has 'batched_mm', so that computation='native' is not known to the"):
        parallelize(tiny_model("dbrx"), whole, kernels=["batched_mm"])
    with pytest.raises(TypeError, match="kernels='sdpa' must be a list"):
        parallelize(model, whole, kernels="sdpa")


def test_of_several_models_those_without_experts_stay_as_they_are() -> None:
    dense = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3", vocab_size=8, hidden_size=8, num_hidden_layers=1)
    )
    models = nn.ModuleDict({"reward": dense, "actor": build("qwen3_moe")})
    apply_kernels(models, ["eager", "batched_mm"], device_type="cpu")
    assert [model.config._attn_implementation for model in models.values()] == ["eager", "eager"]
    assert models["actor"].config._experts_implementation == "batched_mm"
    with pytest.raises(ValueError, match="kernels has 'batched_mm', but Qwen3ForCausalLM has no experts"):
        apply_kernels(dense, ["batched_mm"], device_type="cpu")
    models["actor"] = tiny_model("dbrx")
    with pytest.raises(ValueError, match="the experts of DbrxModel compute in one way only"):
        apply_kernels(models, ["batched_mm"], device_type="cpu")


LIGER = """
import torch, torch.nn.functional as F
from types import MethodType

def apply(rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=True, model=None):
    assert (rope, rms_norm, swiglu, fused_linear_cross_entropy) == (False, True, False, True)
    plain = type(model).forward

    def forward(self, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs):
        output = plain(self, **kwargs)
        if self.training and (labels is not None or shift_labels is not None):
            logits = output.logits.flatten(0, 1).float()
            output.loss = F.cross_entropy(logits, shift_labels.flatten(), reduction="sum") / num_items_in_batch
            if labels is not None and output.aux_loss is not None:
                output.loss += self.router_aux_loss_coef * output.aux_loss
            output.logits = None
        return output

    model.forward = MethodType(forward, model)

MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3_moe": apply}
"""


class TextModule(CausalLMModule):
    def __init__(self, fused: bool, folder: Path) -> None:
        config = {**build("qwen3_moe").config.to_dict(), "output_router_logits": True, "router_aux_loss_coef": 0.5}
        super().__init__(config=config, warmup_steps=1)
        self.fused = fused

    def configure_model(self) -> None:
        super().configure_model()
        if self.fused:
            apply_kernels(self.model, ["liger"], device_type="cuda")
            assert has_fused_loss(self.model)

    def train_dataloader(self) -> Any:
        ids = torch.randint(0, 96, (4, 2, 8), generator=torch.Generator().manual_seed(0))
        labels = ids.masked_fill(ids % 5 == 0, -100)
        batches = [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]
        return DataLoader(batches, batch_size=None)


def test_liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py"):
        file.touch()
    (package / "monkey_patch.py").write_text(LIGER)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="runs on GPUs; leave it out on a CPU"):
        apply_kernels(build("qwen3_moe"), ["liger"], device_type="cpu")
    with pytest.raises(ValueError, match="'liger', which does not know olmoe; it knows qwen3_moe"):
        apply_kernels(build("olmoe"), ["liger"], device_type="cuda")
    # CausalLMModule takes the fused loss, and the load-balancing loss once, beside it.
    results = []
    for fused in (False, True):
        L.seed_everything(3, verbose=False)
        module = TextModule(fused, tmp_path)
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        run = L.Trainer(accelerator="cpu", devices=1, max_steps=2, accumulate_grad_batches=2, **options)
        run.fit(module)
        results.append((float(run.callback_metrics["train_loss"]), module.model.lm_head.weight.detach().clone()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6) and math.isfinite(results[0][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-6)


FLA = """
SIZES = []

def chunk_gated_delta_rule(q, k, v, g, beta, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule
    SIZES.append(kwargs["chunk_size"])
    assert kwargs.keys() == {"chunk_size"}, kwargs.keys()
    return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=initial_state, chunk_size=SIZES[-1],
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

def chunk_kda(*args, **kwargs):
    raise NotImplementedError
"""


def test_flash_linear_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fla" / "ops").mkdir(parents=True)
    for file in ("__init__.py", "ops/__init__.py"):
        (tmp_path / "fla" / file).touch()
    for file in ("gated_delta_rule", "kda"):
        (tmp_path / "fla" / "ops" / f"{file}.py").write_text(FLA)
    monkeypatch.syspath_prepend(tmp_path)
    name = "torch_chunk_gated_delta_rule"
    monkeypatch.setattr(modeling_qwen3_next, name, getattr(modeling_qwen3_next, name))  # put back at the end
    monkeypatch.setattr(modeling_qwen3_5_moe, name, getattr(modeling_qwen3_5_moe, name))
    with pytest.raises(ValueError, match="runs on GPUs; leave it out on a CPU"):
        apply_kernels(tiny_model("qwen3_next"), ["fla"], device_type="cpu")
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM has no layer that flash-linear-attention computes"):
        apply_kernels(build("qwen3_moe"), ["fla"], device_type="cuda")
    with pytest.raises(ValueError, match=r"'fla:16', but chunks of chunk_kda have one of \(32, 64\) tokens"):
        apply_kernels(tiny_model("kimi_linear"), ["fla:16"], device_type="cuda")
    model, batch = tiny_model("qwen3_next").eval(), tiny_batch("qwen3_next", 0, tokens=32)
    before = loss_of_family("qwen3_next", model, batch)
    other = tiny_model("qwen3_next").eval()
    apply_kernels(model, ["fla:32"], device_type="cuda")
    from fla.ops.gated_delta_rule import SIZES

    torch.testing.assert_close(loss_of_family("qwen3_next", model, batch), before)
    assert SIZES and set(SIZES) == {32}
    loss_of_family("qwen3_next", other, batch)  # another model of the family goes on as it was
    assert set(SIZES) == {32}
