"""Initial weights that are the same at every layout.

A model on the meta device, sharded already, comes out with its initial values: each parameter is made whole, by its
module's own initialisation and seeded by its name, then cut; so the peak is the shards plus one parameter. A model
that was built for real is instead checked to be the same on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_moe_ep.experts import initialise_adapters, spread_experts
from lightning_moe_ep.shards import cut


def broadcast_seed(seed: int) -> int:
    """Rank 0's seed, on every rank."""
    seeds = [seed]
    dist.broadcast_object_list(seeds, src=0)
    return seeds[0]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's random numbers start from `seed` inside; outside they go on as if nothing had happened."""
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield


def materialize(model: nn.Module, *, seed: int, device: torch.device) -> None:
    """Give every parameter and buffer that is on the meta device its initial value, in place.

    The values depend on `seed` and the name only, not on the layout. A parameter's value is what the `_init_weights`
    of the transformers model around it, or else the `reset_parameters` of its module and of the modules around, write;
    that of a LoRA adapter is PEFT's.

    Raises:
        ValueError: an initialisation leaves a parameter or buffer unset; names it.
    """
    modules = dict(model.named_modules())
    if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return
    stacked = _stacked_by_us(modules)
    hidden = _hide(modules, stacked)
    made: dict[int, Tensor] = {}
    try:
        for (owner, kind, key), original in hidden.items():
            if not original.is_meta or id(original) in made:
                continue
            name = f"{owner}.{key}" if owner else key
            full: Tensor | None
            if (prefix := stacked.get(id(original))) is None:
                full = _initial_value(modules, owner, kind, key, original, name=name, seed=seed, device=device)
            else:
                full = _initial_values(modules, owner, key, original, prefix=prefix, seed=seed, device=device)
            if full is None:
                raise ValueError(
                    f"the initial value of {name} ({type(modules[owner]).__name__}) cannot be replayed: neither an"
                    " `_init_weights` of transformers nor a `reset_parameters` sets all of it. Build the model for"
                    f" real instead of on the meta device, or give {type(modules[owner]).__name__} a"
                    " `reset_parameters`"
                )
            made[id(original)] = cut(full, original, device=device) if isinstance(original, DTensor) else full
            if isinstance(original, nn.Parameter):
                made[id(original)] = nn.Parameter(made[id(original)], requires_grad=original.requires_grad)
            del full  # before the next one is made
    finally:
        for (owner, kind, key), original in hidden.items():
            getattr(modules[owner], kind)[key] = made.get(id(original), original)


def _stacked_by_us(modules: dict[str, nn.Module]) -> dict[int, str]:
    """The parameters that the plain model has once for each expert: the path of their experts module, by id.

    In `modules` the experts module gives way to that of one expert, which knows how to initialise itself.
    """
    stacked: dict[int, str] = {}
    names = {module: name for name, module in modules.items()}
    for module, spread in list(spread_experts(modules[""])):
        if (expert := spread.adapter.one_expert()) is not None:
            modules[names[module]] = expert
            stacked.update((id(parameter), names[module]) for parameter in spread.parameters())
    return stacked


def _hide(modules: dict[str, nn.Module], stacked: Container[int]) -> dict[tuple[str, str, str], Tensor]:
    """Put a whole tensor on the meta device in place of every parameter and buffer; returns what was there.

    An initialisation may touch more than the parameter that it is replayed for: the rest must not be touched.
    """
    hidden: dict[tuple[str, str, str], Tensor] = {}
    for name, module in modules.items():
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, kind).items():
                if tensor is not None:
                    hidden[name, kind, key] = tensor
    for (name, kind, key), tensor in hidden.items():
        shape = tensor.shape[1:] if id(tensor) in stacked else tensor.shape
        getattr(modules[name], kind)[key] = _placeholder(tensor, shape, "meta")
    return hidden


def _placeholder(tensor: Tensor, shape: torch.Size, device: torch.device | str) -> Tensor:
    whole = torch.empty(shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(whole, requires_grad=False) if isinstance(tensor, nn.Parameter) else whole


def _initial_values(
    modules: dict[str, nn.Module],
    owner: str,
    key: str,
    original: Tensor,
    *,
    prefix: str,
    seed: int,
    device: torch.device,
) -> Tensor | None:
    """The same for a parameter that is stacked: each expert's is the plain model's, which has a name of its own."""
    inner = f"{owner}.{key}".removeprefix(f"{prefix}.")
    values = []
    for number in range(len(original)):
        name = f"{prefix}.{number}.{inner}"
        value = _initial_value(modules, owner, "_parameters", key, original, name=name, seed=seed, device=device)
        if value is None:
            return None
        values.append(value)
    return torch.stack(values)


@torch.no_grad()
def _initial_value(
    modules: dict[str, nn.Module],
    owner: str,
    kind: str,
    key: str,
    original: Tensor,
    *,
    name: str,
    seed: int,
    device: torch.device,
) -> Tensor | None:
    """The whole initial value, or None if the initialisation does not set every element."""
    slots = getattr(modules[owner], kind)
    meta = slots[key]
    name_seed = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
    values = []
    for blank in _blanks(original.dtype):
        target = slots[key] = _placeholder(original, meta.shape, device)
        target.fill_(blank)
        try:
            with seeded(name_seed, device):
                for initialise in _initialisations(modules, owner):
                    initialise()
        finally:
            slots[key] = meta
        values.append(target.detach())
    # An element that still shows what was there before was not set.
    if original.is_floating_point() or original.is_complex():
        return None if values[0].isnan().any() else values[0]
    return values[0] if torch.equal(values[0], values[1]) else None


def _blanks(dtype: torch.dtype) -> list[float]:
    return [float("nan")] if dtype.is_floating_point or dtype.is_complex else [0, 1]


def _initialisations(modules: dict[str, nn.Module], owner: str) -> Iterator[Callable[[], object]]:
    """What initialises the module `owner`, then what the modules around it do, from the inside out."""
    path = owner.split(".") if owner else []
    for length in range(len(path), -1, -1):
        module = modules[".".join(path[:length])]
        around = [modules[".".join(path[:upper])] for upper in range(length, -1, -1)]
        if hasattr(module, "reset_lora_parameters"):
            yield partial(initialise_adapters, module, around)
            continue
        pretrained = next((outer for outer in around if isinstance(outer, PreTrainedModel)), None)
        if pretrained is not None:
            yield partial(pretrained._init_weights, module)
        elif reset := getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None):
            yield reset


def make_replicas_equal(model: nn.Module, *, device: torch.device) -> list[str]:
    """Check that a model that each rank built for real is the same everywhere, and send rank 0's where it is not.

    Args:
        model: may be on another device than the process group's.
        device: the process group's, which what is compared and sent goes through.

    Returns:
        The names of the parameters and buffers that differed; the same on every rank.

    Raises:
        RuntimeError: the ranks built models of different structure, on every rank.
    """
    tensors = {
        name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if not tensor.is_meta
    }
    structure = hashlib.sha256(repr([(n, t.shape, t.dtype) for n, t in tensors.items()]).encode()).hexdigest()
    structures: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(structures, structure)
    if len(set(structures)) > 1:
        others = [rank for rank, other in enumerate(structures) if other != structures[0]]
        raise RuntimeError(
            f"rank(s) {others} built a model of other parameter names, shapes or dtypes than rank 0; every rank must"
            " build the same model"
        )
    if not tensors:
        return []
    sums = torch.stack([_checksum(tensor.detach()).to(device) for tensor in tensors.values()])
    lowest, highest = sums.clone(), sums
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    differing = [name for name, same in zip(tensors, (lowest == highest).all(dim=1).tolist(), strict=True) if not same]
    for name in differing:
        sent = tensors[name].detach().to(device)
        dist.broadcast(sent, src=0)
        tensors[name].detach().copy_(sent)
    return differing


def _checksum(tensor: Tensor) -> Tensor:
    """The sums of the values, of their sizes, and of the values weighed by where they are, along each dimension."""
    values = tensor.double().nan_to_num()
    position = values.new_zeros(())
    for dim, size in enumerate(values.shape):
        others = [other for other in range(values.ndim) if other != dim]
        marginal = values.sum(dim=others) if others else values
        # Roots, as whole weights would let whole values (the ids of a permutation) cancel.
        position += marginal @ torch.arange(1, size + 1, dtype=values.dtype, device=values.device).sqrt()
    return torch.stack([values.sum(), values.abs().sum(), position])
