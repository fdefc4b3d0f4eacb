"""Which kernels there are by name, and which of them go together and are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers.integrations.hub_kernels import is_kernel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_kernels_available

from lightning_moe_ep.experts import Computation

Kind = Literal["attention", "experts", "liger", "fla"]

EXPERTS = "experts:"
"""What stands before the name of an experts implementation that is also that of an attention, such as "eager"."""

CHUNK_SIZES = (16, 32, 64)
"""Of flash-linear-attention, in tokens."""

NO_BACKWARD = ("deepgemm", "deepgemm_megamoe")
"""Experts implementations that cannot train (transformers 5.24)."""


_PACKAGES = {
    "liger": ("liger_kernel", "liger-kernel"),
    "fla": ("fla", "flash-linear-attention"),
    "flash_attention_2": ("flash_attn", "flash-attn --no-build-isolation` or, built already, `pip install kernels"),
    "flash_attention_3": ("flash_attn_interface", "kernels"),
    "flash_attention_4": ("flash_attn", "kernels"),
}
"""By a kernel's name: what is imported for it, and what is installed."""


class NothingToComputeError(ValueError):
    """A model has nothing in it that a kernel computes."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that was asked for."""

    kind: Kind
    name: str
    """What its library calls it."""

    given: str
    """What the user calls it."""

    chunk_size: int = 64
    """Of "fla", in tokens."""


def check_kernels(names: Sequence[str]) -> list[Kernel]:
    """What the names stand for.

    Raises:
        TypeError: something else than a list, such as a name alone.
        ValueError: a name is not known, two are for the same thing, or one cannot train.
        ImportError: what it takes is not installed; says how to get it.
    """
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"kernels={names!r} must be a list of names, such as ['sdpa']")
    kernels: dict[Kind, Kernel] = {}
    for given in names:
        kernel = kernel_named(given)
        if (before := kernels.setdefault(kernel.kind, kernel)) is not kernel:
            raise ValueError(f"kernels has {before.given!r} and {given!r}, two for the same thing; leave one out")
    for kernel in kernels.values():
        _check_installed(kernel)
    return list(kernels.values())


def computation_for(names: Sequence[str], computation: Computation) -> Computation:
    """The experts' computation: an experts implementation of transformers takes their own forward.

    Raises:
        ValueError: both an experts implementation and another computation are asked for.
    """
    chosen = [kernel for kernel in map(kernel_named, names) if kernel.kind == "experts"]
    if not chosen:
        return computation
    if computation not in ("auto", "native"):
        raise ValueError(
            f"kernels has the experts implementation {chosen[0].given!r}, which computation={computation!r} would take"
            " the place of; use computation='auto' or 'native', or leave it out of kernels"
        )
    return "native"


def without_kernels_for_bf16(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names of kernels that run in fp32, and of those that do not."""
    fp32 = [name for name in names if not _takes_bf16_only(kernel_named(name))]
    return fp32, [name for name in names if name not in fp32]


def is_flash(name: str) -> bool:
    """Whether an attention implementation is a flash attention, which computes in bf16 and fp16 on a GPU."""
    return "flash" in name


def _takes_bf16_only(kernel: Kernel) -> bool:
    return (kernel.kind == "attention" and is_flash(kernel.name)) or kernel.name == "sonicmoe"


def kernel_named(given: str) -> Kernel:
    """What a name stands for, installed or not.

    Raises:
        ValueError: it is not known.
    """
    if given == "liger":
        return Kernel("liger", given, given)
    if given == "fla" or given.startswith("fla:"):
        return Kernel("fla", "fla", given, _chunk_size(given))
    experts = ["eager", *ALL_EXPERTS_FUNCTIONS.keys()]
    attentions = [name for name in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()) if not name.startswith("paged|")]
    if given.startswith(EXPERTS):
        name = given.removeprefix(EXPERTS)
        if name in experts:
            return Kernel("experts", name, given)
    elif given in attentions or is_kernel(given):
        return Kernel("attention", given, given)
    elif given in experts:
        return Kernel("experts", given, given)
    shown = [EXPERTS + name if name in attentions else name for name in experts if name not in NO_BACKWARD]
    raise ValueError(
        f"kernels has {given!r}, which is not known; use an attention ({', '.join(sorted(attentions))}, or a repository"
        f" of the kernels hub, as kernels-community/flash-attn2), an experts implementation ({', '.join(shown)}),"
        f" liger, fla, or fla:N for chunks of N tokens ({', '.join(map(str, CHUNK_SIZES))})"
    )


def _chunk_size(given: str) -> int:
    size = given.removeprefix("fla").removeprefix(":") or "64"
    if size not in map(str, CHUNK_SIZES):
        raise ValueError(f"kernels has {given!r}, but flash-linear-attention has chunks of one of {CHUNK_SIZES} tokens")
    return int(size)


def _check_installed(kernel: Kernel) -> None:
    if kernel.kind == "experts" and kernel.name in NO_BACKWARD:
        raise ValueError(f"kernels has {kernel.given!r}, which has no backward (transformers 5.24): it cannot train")
    if kernel.name == "sonicmoe":
        try:
            from transformers.integrations.sonicmoe import is_sonicmoe_loadable

            is_sonicmoe_loadable(raise_error=True)
        except ImportError as error:
            raise ImportError(f"kernels has {kernel.given!r}, but: {error} (`pip install kernels`)") from error
    otherwise = ("kernels", "kernels") if is_kernel(kernel.name) else (None, None)
    package, needed = _PACKAGES.get(kernel.name, otherwise)
    # transformers takes a flash attention from the hub where its own package is missing.
    from_hub = kernel.kind == "attention" and is_kernels_available()
    if package is not None and not from_hub and importlib.util.find_spec(package) is None:
        raise ImportError(f"kernels has {kernel.given!r}, which is not installed; `pip install {needed}`")
