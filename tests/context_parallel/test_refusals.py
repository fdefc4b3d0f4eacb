"""What context parallelism cannot do is refused with words: models before they are touched, batches on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe

from lightning_moe_ep import MoELayer
from lightning_moe_ep.context_parallel import masks, shard_sequences
from lightning_moe_ep.context_parallel.supported import check_supported
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.mesh import build_meshes
from lightning_moe_ep.parallelize import parallelize
from tests.context_parallel.parity import batch_of, build
from tests.families.multimodal import multimodal_model
from tests.families.tiny import tiny_model
from tests.models import OwnModel
from tests.pool import RankPool


class Shifting(nn.Module):
    """Gives each token something of the one before."""

    def forward(self, hidden: Tensor) -> Tensor:
        return shifted(hidden)


def shifted(hidden: Tensor) -> Tensor:
    return hidden + hidden.roll(1, dims=1)


class Padding(nn.Module):
    """As above."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.pad(hidden[:, :-1], (0, 0, 1, 0))


class Summing(modeling_qwen3_moe.Qwen3MoeForCausalLM):
    """Tokens meet in the model's own forward."""

    def forward(self, *args: Any, position_ids: Any = None, attention_mask: Any = None, **options: Any) -> Any:
        output = super().forward(*args, position_ids=position_ids, attention_mask=attention_mask, **options)
        output.logits = output.logits.cumsum(dim=1)
        return output


class GroupedExperts(modeling_qwen3_moe.Qwen3MoeExperts):
    """Sums up how many rows experts have, as kernels for groups want it."""

    def ends(self, of_rows: Tensor) -> Tensor:
        return of_rows.bincount(minlength=self.num_experts).cumsum(dim=0)


class AttentionOfItsOwn(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.softmax(torch.matmul(hidden, hidden.mT), dim=-1) @ hidden


def with_part(part: nn.Module) -> nn.Module:
    model = build("qwen3_moe")
    model.model.layers[1].part = part
    return model


def with_unlike_heads() -> nn.Module:
    model = build("qwen3_moe", num_attention_heads=8)
    layer = model.model.layers[1]
    layer.self_attn.o_proj = nn.Linear(2 * 16, 64)
    return model


def with_attention(name: str) -> nn.Module:
    AttentionInterface.register("maskless", sdpa_attention_forward)
    ALL_ATTENTION_FUNCTIONS["local"] = sdpa_attention_forward
    model = build("qwen3_moe")
    model.config._attn_implementation = name
    return model


def with_adapter(config: type, **options: Any) -> nn.Module:
    return get_peft_model(build("qwen3_moe"), config(task_type="CAUSAL_LM", **options))


def activated_lora() -> nn.Module:
    return with_adapter(LoraConfig, target_modules=["q_proj"], alora_invocation_tokens=[5, 6])


MODELS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "heads": (lambda: build("qwen3_moe"), 3, "cp=3 does not divide the 4 attention heads of Qwen3MoeAttention"),
    "heads of a layer": (with_unlike_heads, 4, r"cp=4 does not divide the 2 attention heads .* use one of \[1, 2\]"),
    "own": (OwnModel, 2, "OwnModel is no model of transformers .* derive it from PreTrainedModel"),
    "linear": (lambda: tiny_model("qwen3_next"), 2, "qwen3_next has layers of linear_attention"),
    "chunked": (lambda: tiny_model("llama4_text"), 2, "llama4_text has layers of chunked_attention"),
    "indexer": (lambda: tiny_model("deepseek_v32"), 2, "deepseek_v32 has layers of indexed_attention"),
    "mamba": (lambda: tiny_model("nemotron_h"), 2, "nemotron_h has layers of linear_attention, through"),
    "encoder": (lambda: tiny_model("switch_transformers"), 2, "switch_transformers has an encoder and a decoder"),
    "images": (lambda: multimodal_model("qwen3_vl_moe"), 2, "qwen3_vl_moe takes more than text"),
    "convolution": (lambda: with_part(nn.Conv1d(64, 64, 3)), 2, r"layers.1.part \(Conv1d\) is not known to leave"),
    "lstm": (lambda: with_part(nn.LSTM(64, 64)), 2, r"part \(LSTM\) is not known to leave tokens apart"),
    "shift": (lambda: with_part(Shifting()), 2, r"part \(Shifting\) uses roll, through which tokens may meet"),
    "padding": (lambda: with_part(Padding()), 2, r"part \(Padding\) uses pad, through which tokens may meet"),
    "forward": (lambda: Summing(build("qwen3_moe").config), 2, r"the model \(Summing\) uses cumsum, through which"),
    "attention": (lambda: with_part(AttentionOfItsOwn()), 2, r"\(AttentionOfItsOwn\) multiplies matrices and takes"),
    "mask": (lambda: with_attention("maskless"), 2, "no mask function for attn_implementation='maskless'"),
    "unknown": (
        lambda: with_attention("unknown"),
        2,
        "Qwen3MoeAttention has an attn_implementation='unknown' of its own",
    ),
    "local": (lambda: with_attention("local"), 2, "Qwen3MoeAttention has an attn_implementation='local' of its own"),
    "prompt": (
        lambda: with_adapter(PromptTuningConfig, num_virtual_tokens=3),
        2,
        r"the adapter 'default' \(PromptTuningConfig\) puts something of its own before each sequence",
    ),
    "prefix": (
        lambda: with_adapter(PrefixTuningConfig, num_virtual_tokens=3),
        2,
        "PrefixTuningConfig.* puts something",
    ),
    "activated": (activated_lora, 2, r"the adapter 'default' \(LoraConfig\) begins at certain tokens of a sequence"),
    "norm": (lambda: with_part(nn.BatchNorm1d(64)), 2, r"part \(BatchNorm1d\) is not known to leave tokens apart"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models(case: str) -> None:
    make, cp, words = MODELS[case]
    with pytest.raises((NotImplementedError, ValueError), match=words):
        check_supported(make(), cp=cp)


def test_what_leaves_tokens_apart_is_not_refused() -> None:
    experts = MoELayer(64, num_experts=4, top_k=2, intermediate_size=32)
    model = with_part(nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64), nn.GELU(), experts))
    model.model.layers[0].mlp.experts = GroupedExperts(model.config)
    check_supported(model, cp=2)


class Around(nn.Module):
    """As a LightningModule is: what it does with labels is its own."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.model, self.head, self.loss = build("qwen3_moe"), head, nn.CrossEntropyLoss()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["labels"].roll(1).cumsum(dim=1)


def test_what_is_around_a_model() -> None:
    check_supported(Around(nn.Linear(64, 1)), cp=2)
    check_supported(with_adapter(LoraConfig, target_modules=["q_proj"]), cp=2)
    with pytest.raises(NotImplementedError, match=r"head \(LSTM\) is not known to leave tokens apart"):
        check_supported(Around(nn.LSTM(64, 1)), cp=2)


RINGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "eager": ({"attention": "eager"}, "cpu", "is torch's own attention, 'sdpa', but .* attn_implementation='eager'"),
    "window": ({"kind": "mixtral"}, "cpu", "has no sliding windows, but those of MixtralAttention are 5"),
    "values": (
        {"kind": "deepseek_v3"},
        "cpu",
        "values as wide as keys, but those of DeepseekV3Attention are 12 and 16",
    ),
    "dropout": ({"attention_dropout": 0.1}, "cpu", "has no dropout, but Qwen3MoeAttention has attention_dropout=0.1"),
    "device": ({}, "mps", "on CUDA and on the CPU, not on mps"),
    "width": ({"head_dim": 20}, "cuda", "a multiple of 8, at most 256, but those of Qwen3MoeAttention are 20 wide"),
}


@pytest.mark.parametrize("case", RINGS)
def test_rings(case: str) -> None:
    options, device, words = RINGS[case]
    model = build(**{"kind": "qwen3_moe", **options})
    with pytest.raises(NotImplementedError, match=f"cp_mode='ring' .*{words}.* use cp_mode='ulysses'"):
        check_supported(model, cp=2, mode="ring", device_type=device)


def refused(model: nn.Module, batch: dict[str, Any]) -> str:
    try:
        model(**batch)
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return "not refused"


def ask() -> dict[str, Any]:
    """On a rank: what is refused of batches, and what of the process is left as it was."""
    rank, meshes = dist.get_rank(), build_meshes(Layout.for_world(2, ep=1, cp=2), "cpu")
    whole = batch_of("even", 0)
    inputs = {"input_ids": whole["input_ids"]}
    others = {"same family": build("qwen3_moe").eval(), "eager": build("gpt_oss").eval()}
    with torch.no_grad():
        before = {name: other(**inputs).logits for name, other in others.items()}

    def spread(kind: str, **options: Any) -> PreTrainedModel:
        model = build(kind, **{key: value for key, value in options.items() if key != "cp_mode"})
        parallelize(model, meshes, **{key: value for key, value in options.items() if key == "cp_mode"})
        return model

    model, eager, ring = spread("qwen3_moe"), spread("gpt_oss"), spread("qwen3_moe", cp_mode="ring")
    part = shard_sequences(inputs, rank=rank, size=2)
    answers: dict[str, Any] = {
        "no positions": refused(model, {**part, "position_ids": None}),
        "one rank": refused(model, part if rank == 0 else {**part, "position_ids": None}),
        "other lengths": refused(model, {name: tensor[:, : 8 - rank] for name, tensor in part.items()}),
        "whole": refused(model, shard_sequences(inputs, rank=0, size=1) | {"attention_mask": None}),
        "cache": refused(model, {**part, "use_cache": True}),
        "generate": refused_generation(model, part),
        "weights": refused(model, {**part, "output_attentions": True}),
        "4-D mask": refused(model, {**part, "attention_mask": torch.ones(2, 1, 8, 8)}),
        "labels": refused(model, {**part, "labels": part["input_ids"]}),
        "lengths": refused(model, {**part, "cu_seq_lens_q": torch.tensor([0, 8])}),
        "block": refused(model, {**part, "position_ids": part["position_ids"][:, :3]}),
        "ring padded": refused(ring, shard_sequences(batch_of("padded", 0), rank=rank, size=2)),
        "ring packed": refused(ring, shard_sequences(batch_of("packed", 0), rank=rank, size=2)),
    }
    packed = shard_sequences(batch_of("packed", 0), rank=rank, size=2)
    axes = packed["position_ids"].expand(4, -1, -1)
    answers["axes"] = [
        masks._whole_sequences(None, packed["attention_mask"], each, meshes.cp_mesh.get_group()).positions is not None
        for each in (axes, axes[1:])
    ]
    answers["interrupted"] = interrupted(model, {**packed, "use_cache": False})
    # After all that was refused, a forward is right: of the inner model, by embeddings, with gradients off.
    with torch.no_grad():
        hidden = model.model(**part).last_hidden_state
        logits = model.lm_head(hidden) if isinstance(model.lm_head, nn.Linear) else None
        embedded = {**part, "inputs_embeds": build("qwen3_moe").get_input_embeddings()(part["input_ids"])}
        embedded.pop("input_ids")
        by_embeddings = model.eval()(**embedded).logits
        eager(**part)
        after = {name: other(**inputs).logits for name, other in others.items()}
    assert logits is not None
    right = before["same family"][:, 8 * rank : 8 * rank + 8]
    answers["right"] = [float((each - right).abs().max()) for each in (by_embeddings, model(**part).logits)]
    answers["others"] = [torch.equal(before[name], after[name]) for name in others]
    answers["wrapped once"] = wrapped_once()
    return answers


def refused_generation(model: PreTrainedModel, part: dict[str, Any]) -> str:
    try:
        model.generate(input_ids=part["input_ids"], max_new_tokens=2)
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return "not refused"


def interrupted(model: PreTrainedModel, part: dict[str, Any]) -> str:
    """What the next forward would take for its sequences."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.lm_head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**part)
    handle.remove()
    return str(masks._running.get())


def wrapped_once() -> bool:
    functions = [
        ALL_ATTENTION_FUNCTIONS["sdpa"],
        ALL_MASK_ATTENTION_FUNCTIONS["sdpa"],
        modeling_gpt_oss.eager_attention_forward,
        modeling_qwen3_moe.eager_attention_forward,
    ]
    return all(hasattr(each, "__wrapped__") and not hasattr(each.__wrapped__, "__wrapped__") for each in functions)


WORDS = {
    "no positions": ("must be told the positions of its slice; call `batch = strategy.shard_sequences(batch)`",),
    "one rank": ("rank(s) [1], which hold slices of the same sequences", "must be told the positions"),
    "other lengths": ("ranks [0, 1] hold slices of the same sequences, but of [[2, 8], [2, 7]] tokens",),
    "whole": ("given the same tokens at the same positions: whole sequences, not slices",),
    "cache": ("a cache of keys and values",),
    "generate": ("positions", "cache"),
    "weights": ("output_attentions=True",),
    "4-D mask": ("attention_mask [2, 1, 8, 8] is not one of tokens [2, 8]",),
    "labels": ("labels would be shifted within the slice",),
    "lengths": ("cu_seq_lens_q: at cp > 1, packed sequences are told by position_ids",),
    "block": ("position_ids [2, 3] are not those of tokens [2, 8]",),
    "ring padded": ("cp_mode='ring' knows one whole sequence a row, but these have padding",),
    "ring packed": ("cp_mode='ring' knows one whole sequence a row, but these have several in a row",),
}


def test_batches(ranks: RankPool) -> None:
    for rank, answers in enumerate(ranks.run(ask, world=2)):
        for case, words in WORDS.items():
            said = answers[case]
            if case == "generate":
                assert any(each in said for each in words), said
            else:
                assert words[rank % len(words)] in said, f"{case} on rank {rank}: {said}"
        assert max(answers["right"]) < 1e-5
        assert answers["others"] == [True, True], "a model that is not spread computes something else than before"
        assert answers["wrapped once"]
        assert answers["interrupted"] == "None", "masks of a forward that was interrupted are taken for the next"
        assert answers["axes"] == [True, False], "positions of text mark packing, places in pictures do not"
