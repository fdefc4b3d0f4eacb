"""Liger's kernels: norms, and the loss that is computed with the head in pieces, so that logits are never there whole.

Its kernels for experts are left out, as experts compute by `computation`, and so is what it patches for all models of
the process where that is left to choose. Read at liger-kernel 0.8.5.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_moe_ep.kernels.names import Kernel

_FUSED_LOSS = "_has_fused_loss"


def use_liger(model: PreTrainedModel, kernel: Kernel, device_type: str) -> str:
    """Put them into a plain model; what comes out says what was.

    Raises:
        ValueError: the device, or Liger, does not know the model.
    """
    if device_type == "cpu":
        raise ValueError("kernels has 'liger', which is Triton's and runs on GPUs; leave it out on a CPU")
    # Private in liger-kernel; there is no public way to a model that exists.
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    family = model.config.model_type
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(family)
    if apply is None:
        known = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise ValueError(f"kernels has 'liger', which does not know {family}; it knows {known}")
    takes = inspect.signature(apply).parameters
    wanted = [name for name in ("rms_norm", "fused_linear_cross_entropy") if name in takes]
    # No loss but that of a model with a head.
    if model.get_output_embeddings() is None:
        wanted = [name for name in wanted if name != "fused_linear_cross_entropy"]
    if not wanted:
        raise ValueError(f"kernels has 'liger', which has neither a norm nor a fused loss for {type(model).__name__}")
    flags = {name: name in wanted for name, parameter in takes.items() if isinstance(parameter.default, bool)}
    apply(**flags, model=model)
    setattr(model, _FUSED_LOSS, "fused_linear_cross_entropy" in wanted)
    return f"{' and '.join(wanted)} of {type(model).__name__}"


def has_fused_loss(model: nn.Module) -> bool:
    """Whether the model computes the loss itself, in pieces, where it is given labels in training."""
    return vars(model).get(_FUSED_LOSS, False)


def summing(targets: Tensor) -> dict[str, Any]:
    """The arguments of the forward by which `output.loss` is the sum of the fused loss alone.

    Args:
        targets: `[B, S]`, shifted already: to the loss of other labels the model adds that for balancing.
    """
    return {"shift_labels": targets, "num_items_in_batch": 1}
