"""What context parallelism can spread, told before anything is changed.

Tokens may meet in attention that goes through transformers' interface, and nowhere else; what a module does besides is
told from its class. What is not known to leave tokens apart is refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from inspect import signature
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import activation, dropout, loss, normalization
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from lightning_moe_ep.experts import find_experts
from lightning_moe_ep.layout import divisors_of

_TOKEN_BY_TOKEN = (
    *(
        nn.Linear,
        nn.Embedding,
        nn.Identity,
        nn.ModuleList,
        nn.ModuleDict,
        nn.Sequential,
        nn.ParameterList,
        nn.ParameterDict,
    ),
    *(getattr(dropout, name) for name in dropout.__all__),
    *(getattr(activation, name) for name in activation.__all__ if name != "MultiheadAttention"),
    *(getattr(loss, name) for name in loss.__all__),
    *(normalization.LayerNorm, normalization.RMSNorm),
)
_ALONG_TOKENS = (
    *(nn.RNNBase, nn.Conv1d, nn.ConvTranspose1d),
    *(nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
)
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "mlp", "moe"}
_PAST_POSITIONS = {
    *("linear_attention", "conv", "hybrid", "hybrid_sliding", "minimax_m3_sparse"),
    *("compressed_sparse_attention", "heavily_compressed_attention"),
}
"""Layers that go on from one packed sequence to the next; measured with transformers 5.24."""
_MEET = {
    *("conv1d", "conv2d", "conv_transpose1d", "avg_pool1d", "unfold"),
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
    *("diff", "flip", "pad", "roll"),
    *("fft", "rfft", "stft"),
    "scaled_dot_product_attention",
}
_MEET_BY_NAME = re.compile(r"Attn|Attention|Conv|Mamba|SSM|Recurr|Delta|R[wW][kK][vV]|Mixer|Indexer|Compressor|Shift")
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
EAGER = "eager_attention_forward"
"""What the files of models call their own attention, which is in no register."""

_OUTPUT = ("o_proj", "out_proj", "dense", "wo")


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that compute attention through transformers' interface."""
    return [module for module in model.modules() if _calls_attention_interface(type(module))]


def check_supported(model: nn.Module, *, cp: int, mode: str = "ulysses", device_type: str = "cpu") -> None:
    """Check that tokens meet in the model's attention and nowhere else, and that its heads can be scattered.

    Args:
        model: plain.
        cp: over how many ranks.
        mode: by ring attention heads need not be scattered, but little else is served.
        device_type: where the model will be.

    Raises:
        NotImplementedError: tokens meet elsewhere, or it cannot be told, or `mode` cannot serve the model there.
        ValueError: `cp` does not divide a number of heads.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    within = {id(module) for each in models for module in each.modules()}
    attentions = attention_modules(model)
    if not attentions or any(id(module) not in within for module in attentions):
        raise NotImplementedError(
            f"cp={cp}: {type(model).__name__} is no model of transformers whose attention goes through its attention"
            " interface (ALL_ATTENTION_FUNCTIONS), which is where cp ranks exchange tokens; derive it from"
            " PreTrainedModel and use the interface, or use cp=1"
        )
    for each in models:
        if attention_modules(each) and (problem := _problem_of_model(each)):
            raise NotImplementedError(f"cp={cp}: {each.config.model_type} {problem}; use cp=1")
    adapters = {name: each for module in model.modules() for name, each in _adapters(module).items()}
    for name, adapter in adapters.items():
        if problem := _problem_of_adapter(adapter):
            raise NotImplementedError(f"cp={cp}: the adapter {name!r} ({type(adapter).__name__}) {problem}; use cp=1")
    # Experts are given rows of all ranks in any order: what they add up is no sequence.
    experts = {id(module) for found in find_experts(model) for module in found.module.modules()}
    named = [(name, module) for name, module in model.named_modules() if id(module) not in experts]
    kinds = {(type(module), id(module) in within): name for name, module in reversed(named)}
    for (cls, inside), name in kinds.items():
        if problem := _problem_of_class(cls, model.get_submodule(name), inside=inside):
            raise NotImplementedError(f"cp={cp}: {name or 'the model'} ({cls.__name__}) {problem}; use cp=1")
    for module in attentions:
        if problem := problem_of_implementation(module):
            raise NotImplementedError(f"cp={cp}: {problem}; use cp=1, or another attn_implementation")
        if mode == "ring":
            if problem := _problem_of_ring(module, device_type):
                raise NotImplementedError(f"cp_mode='ring' {problem}; use cp_mode='ulysses'")
        elif (heads := heads_of(module)) % cp:
            raise ValueError(
                f"cp={cp} does not divide the {heads} attention heads of {type(module).__name__}, which are scattered"
                f" over the cp ranks; use one of {divisors_of(heads)}"
            )


def names_of_forward(module: nn.Module) -> dict[str, Any]:
    """What is global where the module's forward was written."""
    cls = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return inspect.unwrap(vars(cls)["forward"]).__globals__


def problem_of_implementation(module: nn.Module) -> str | None:
    """Why the function by which this module computes attention cannot be wrapped; None: it can."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    names, cls = names_of_forward(module), type(module).__name__
    register = names.get("ALL_ATTENTION_FUNCTIONS")
    if name is None or not isinstance(register, AttentionInterface):
        return f"{cls} has no config that names an attn_implementation of transformers' register"
    if name == "eager" and EAGER not in names:
        return f"the file of {cls} has no {EAGER}"
    if name != "eager" and (name not in register or register[name] is not type(register)().get(name)):
        return f"{cls} has an attn_implementation={name!r} of its own"
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        return f"there is no mask function for attn_implementation={name!r}, so that masks would be of a slice"
    return None


def heads_of(module: nn.Module) -> int:
    """Query heads of an attention module; layers of one model may have different numbers."""
    width = getattr(module, "v_head_dim", None) or getattr(module, "head_dim", None)
    for name in _OUTPUT:
        inner = getattr(getattr(module, name, None), "in_features", 0)
        if width and inner and inner % width == 0:
            return int(inner // width)
    return int(getattr(module, "num_heads", None) or module.config.num_attention_heads)


def problem_of_packing(model: nn.Module) -> str | None:
    """Why packed sequences would see each other in one process; None: their positions keep them apart, or not known."""
    for each in model.modules():
        if not isinstance(each, PreTrainedModel) or not attention_modules(each):
            continue
        if kinds := set(getattr(each.config, "layer_types", None) or ()) & _PAST_POSITIONS:
            return f"its layers of {', '.join(sorted(kinds))} take a row for one sequence"
        makers = [code for code in _codes(type(each), only="forward") if "create_causal_mask" in code.co_names]
        given = [keys for code in makers for keys in code.co_consts if isinstance(keys, tuple)]
        flash = is_flash_attention_requested(requested_attention_implementation=each.config._attn_implementation)
        if makers and not flash and not any({"inputs_embeds", "position_ids"} <= {*keys} for keys in given):
            return f"{type(each).__name__} makes its masks without positions"
    return None


def rope_grows(model: PreTrainedModel) -> bool:
    """Whether frequencies of rotary embeddings depend on the largest position that there is."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    of_kinds = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    return any(each.get("rope_type") in ("dynamic", "longrope") for each in of_kinds)


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """What makes rotary embeddings from positions."""
    return [
        module
        for module in model.modules()
        if "Rotary" in type(module).__name__ and "position_ids" in signature(module.forward).parameters
    ]


def _problem_of_model(model: PreTrainedModel) -> str | None:
    kinds = set(getattr(model.config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if kinds:
        return f"has layers of {', '.join(sorted(kinds))}, through which tokens meet outside of its attention"
    if getattr(model.config, "is_encoder_decoder", False):
        return "has an encoder and a decoder, of which only one would have slices"
    if missing := {"position_ids", "attention_mask"} - signature(model.forward).parameters.keys():
        return f"takes no {' and no '.join(sorted(missing))}, and would take its slice for the whole"
    if model.config.get_text_config() is not model.config:
        return "takes more than text, and what an image becomes would lie in several slices"
    if rope_grows(model) and not rotary_modules(model):
        return "has rotary embeddings that depend on the length of the sequences, in no module of their own"
    return None


def _adapters(module: nn.Module) -> dict[str, Any]:
    """PEFT's configurations by name, of a module that it has put around a model or into one."""
    found = getattr(module, "peft_config", None)
    return found if isinstance(found, dict) else {}


def _problem_of_adapter(adapter: Any) -> str | None:
    # Of other adapters the layers tell, as of any model.
    if getattr(adapter, "is_prompt_learning", False):
        return "puts something of its own before each sequence, and would before each slice"
    if getattr(adapter, "alora_invocation_tokens", None):
        return "begins at certain tokens of a sequence, which not every slice of it has"
    return None


def _problem_of_class(cls: type[nn.Module], module: nn.Module, *, inside: bool) -> str | None:
    if not inside:  # a LightningModule, its losses and metrics, which are given what they are given
        return "is not known to leave tokens apart" if issubclass(cls, _ALONG_TOKENS) else None
    if cls.__module__.startswith("torch."):
        return None if issubclass(cls, _TOKEN_BY_TOKEN) else "is not known to leave tokens apart"
    only = "forward" if issubclass(cls, PreTrainedModel) else None  # which prepares generation and more, besides
    names = {name for code in _codes(cls, only=only, helpers=True) for name in code.co_names}
    if meet := sorted(names & (_MEET - {"cumsum"} if _calls_attention_interface(cls) else _MEET)):
        return f"uses {', '.join(meet)}, through which tokens may meet"
    if only:
        return None
    if _calls_attention_interface(cls):
        if "position_bias" in {name for code in _codes(cls) for name in _keywords(code)}:
            return "adds a bias to each pair of positions, of which a rank would know its slice's"
        return None
    if "softmax" in names and names & _PRODUCTS:
        return "multiplies matrices and takes a softmax, as attention of its own would"
    if _MEET_BY_NAME.search(cls.__name__) and not attention_modules(module):
        return "is named as if tokens met in it, but does not go through transformers' attention interface"
    return None


def _problem_of_ring(module: nn.Module, device_type: str) -> str | None:
    config, name = module.config, type(module).__name__
    width = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
    if device_type not in ("cpu", "cuda"):
        return f"is served by torch on CUDA and on the CPU, not on {device_type}"
    if config._attn_implementation != "sdpa":
        return f"is torch's own attention, 'sdpa', but {name} has attn_implementation={config._attn_implementation!r}"
    if getattr(config, "sliding_window", None) is not None:
        return f"has no sliding windows, but those of {name} are {config.sliding_window}"
    if getattr(module, "v_head_dim", width) != width:
        return f"needs values as wide as keys, but those of {name} are {module.v_head_dim} and {width}"
    if not getattr(module, "is_causal", True):
        return f"is causal, but {name} is not"
    if getattr(module, "attention_dropout", 0.0):
        return f"has no dropout, but {name} has attention_dropout={module.attention_dropout}"
    if device_type == "cuda" and (width is None or width % 8 or width > 256):
        return f"needs heads of a multiple of 8, at most 256, but those of {name} are {width} wide"
    return None


def _calls_attention_interface(cls: type[nn.Module]) -> bool:
    return any("ALL_ATTENTION_FUNCTIONS" in code.co_names for code in _codes(cls))


def _codes(cls: type[nn.Module], *, only: str | None = None, helpers: bool = False) -> Iterator[CodeType]:
    """The code of a module's class, without what all modules and all transformers models have.

    With `only`, of the methods of that name. With `helpers`, also that of the functions of the same file that it calls.
    """
    waiting = [
        inspect.unwrap(member)
        for base in cls.__mro__
        if not _is_common(base.__module__)
        for name, member in vars(base).items()
        if inspect.isfunction(member) and only in (None, name)
    ]
    seen = set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        yield function.__code__
        if helpers:
            called = (function.__globals__.get(name) for name in function.__code__.co_names)
            waiting += [
                inspect.unwrap(each)
                for each in called
                if isinstance(each, FunctionType) and each.__module__ == function.__module__
            ]


def _is_common(module: str) -> bool:
    library = module.split(".")[0]
    return library in ("builtins", "torch") or (
        library == "transformers" and not module.startswith("transformers.models.")
    )


def _keywords(code: CodeType) -> Iterator[str]:
    """Names by which arguments are passed on."""
    for constant in code.co_consts:
        if isinstance(constant, tuple):
            yield from (each for each in constant if isinstance(each, str))
