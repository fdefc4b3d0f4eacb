"""Refusing what cannot be sharded: weights that a quantisation has packed into fewer than 16 bits."""

from __future__ import annotations

from torch import nn

_BITSANDBYTES = {"Params4bit": "bitsandbytes, 4 bits", "Int8Params": "bitsandbytes, 8 bits"}


def check_not_quantized(model: nn.Module) -> None:
    """Check that no parameter is quantised.

    Raises:
        NotImplementedError: one is; names it, its class and how it is quantised.
    """
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            by = _BITSANDBYTES.get(type(parameter).__name__)
            if by is None and parameter.element_size() >= 2:
                continue
            raise NotImplementedError(
                f"{f'{name}.{key}'.lstrip('.')} of {type(module).__name__} is quantised ({by or parameter.dtype}), and"
                " its parts cannot be sharded; load the model in bf16, without a quantization_config"
            )
