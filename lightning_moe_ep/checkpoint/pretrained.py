"""Weights from a Hugging Face folder into a model that is sharded already.

Each rank reads the bytes of its own experts and of its share of the rest. All that can be wrong with the names, shapes
and files is found from the files' headers, before a weight is read, and is said on every rank.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from lightning_moe_ep.checkpoint.agreement import together
from lightning_moe_ep.checkpoint.conversions import PlainRecipes, plain_recipes
from lightning_moe_ep.checkpoint.dequantize import dequantizer
from lightning_moe_ep.checkpoint.places import Place, files_of, needed_by, plan_places
from lightning_moe_ep.checkpoint.prefetch import prefetch
from lightning_moe_ep.checkpoint.rebuilt import origin_of, plain_tensors
from lightning_moe_ep.checkpoint.recipes import InCheckpoint
from lightning_moe_ep.checkpoint.safetensors_files import OpenFiles, stored_tensors
from lightning_moe_ep.checkpoint.stored import META, open_checkpoint
from lightning_moe_ep.initialization import materialize
from lightning_moe_ep.transformers_models import outermost_models

_log = logging.getLogger(__name__)

READERS = 4
"""Threads of a rank that read: enough to keep a disk or network busy, few enough that little is held at once."""

_WAITING = "_waits_for_pretrained"


def build_pretrained(
    folder: str | Path, auto_class: Any = AutoModelForCausalLM, *, read_ahead: bool = False, **options: Any
) -> Any:
    """A transformers model for the weights in a folder, on the meta device: the strategy reads them once it is sharded.

    To be called in `configure_model`, in place of `from_pretrained`, which would read the whole model on every rank.

    Args:
        folder: a local Hugging Face folder; or a Trainer's checkpoint, folder or file, that our strategy has saved of a
            module with one transformers model, whose weights alone are taken.
        auto_class: which of transformers' automatic classes builds the model, or a model class; for a checkpoint, the
            class is the one that it was saved with.
        read_ahead: as in `load_pretrained`.
        options: further arguments of its `from_config`, such as `dtype` or `attn_implementation`. By default the
            dtype is torch's default one, whatever the files have.

    Raises:
        FileNotFoundError: there is no such folder.
        NotImplementedError: the weights are quantised in another way than FP8 blocks or MXFP4, which are dequantised.
    """
    folder = Path(folder)
    config, kind = pretrained_config(folder)
    options = {"dtype": torch.get_default_dtype(), **options}
    auto_class = kind or auto_class
    from_config = getattr(auto_class, "from_config", None) or auto_class._from_config
    with torch.device("meta"):
        model = from_config(config, **options)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    setattr(model, _WAITING, (folder, read_ahead))
    model.register_load_state_dict_pre_hook(_have_values)
    return model


def _have_values(model: nn.Module, *_: object) -> None:
    """Before a state dict is loaded (`load_from_checkpoint`) into a model that nothing has filled: give it memory."""
    if vars(model).pop(_WAITING, None) is not None:
        materialize(model, seed=0, device=torch.device("cpu"))


def pretrained_config(source: Path) -> tuple[PreTrainedConfig, type[PreTrainedModel] | None]:
    """The configuration of a folder's model, or of that in a Trainer's checkpoint, with its class.

    Raises:
        FileNotFoundError: there is no such folder or checkpoint.
        NotImplementedError: the weights are quantised in another way than FP8 blocks or MXFP4, which are dequantised.
    """
    if not source.exists():
        raise FileNotFoundError(
            f"pretrained={str(source)!r} is neither a folder nor a checkpoint; download the model's files first"
        )
    if _is_checkpoint(source):
        origin = origin_of(open_checkpoint(source))
        return origin.config, origin.kind
    quantizer = _quantization(source)
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    if quantizer is not None:
        del config.quantization_config  # the model's weights will not be quantised
    return config, None


def problems_of(folder: Path) -> list[str]:
    """What keeps a Hugging Face folder from being read, a line each; nothing where transformers has no such class."""
    try:
        config, _ = pretrained_config(folder)
        kind = getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)
        model = build_pretrained(folder, kind)
    except NotImplementedError as error:
        return [str(error)]
    except Exception:  # code of the model's own, or a configuration that transformers does not know
        return []
    try:
        plan_places(model, _recipes(model, folder), source=folder, strict=True)
    except ValueError as error:
        return [line.strip() for line in str(error).splitlines()]
    return []


def read_pretrained(module: nn.Module, *, device: torch.device) -> None:
    """Fill the models in `module` that `build_pretrained` made, each from its folder; every rank calls this."""
    for model in module.modules():
        if (waiting := vars(model).pop(_WAITING, None)) is not None:
            folder, read_ahead = waiting
            load_pretrained(model, folder, device=device, read_ahead=read_ahead)


def waiting_places(module: nn.Module) -> list[Place]:
    """Where the values of the models in `module` that `build_pretrained` made will come from; none is read.

    Raises:
        ValueError: a folder does not fit its model, or its files are missing or damaged.
    """
    places = []
    for model in module.modules():
        if (waiting := vars(model).get(_WAITING)) is not None:
            places += plan_places(model, _recipes(model, waiting[0]), source=waiting[0], strict=True)
    return places


def leave_unread(module: nn.Module) -> list[str]:
    """Let the models in `module` that `build_pretrained` made have new weights; returns the folders."""
    waiting = [vars(model).pop(_WAITING, None) for model in module.modules()]
    return [str(folder) for folder, _ in filter(None, waiting)]


@dataclass(frozen=True)
class LoadReport:
    """What reading a model took on this rank."""

    bytes_read: int
    """Of the files, without what was read ahead."""

    bytes_held: int
    """Of the model's tensors on this rank, in the dtype of the files: what it has to read at least."""

    bytes_ahead: int
    """What it read ahead for the ranks of its node, with the gaps between."""


def load_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    device: torch.device | None = None,
    strict: bool = True,
    read_ahead: bool = False,
) -> LoadReport:
    """Fill a model from a Hugging Face folder, in place; every rank calls this.

    Args:
        model: a transformers model, or what is around one (a PeftModel); sharded at any layout, or plain; on the meta
            device or real. What is no DTensor is read on rank 0 and sent to the others.
        folder: holds `config.json`, and `model.safetensors` or several such files with their index; or a Trainer's
            checkpoint. Seen by all ranks.
        device: where tensors go that are on the meta device; None: the device of the mesh, or the CPU.
        strict: whether the folder must have all that the model has, and nothing else. If not, what it lacks stays as
            it is (on the meta device, it waits for `materialize`).
        read_ahead: whether the ranks of a node first bring what they need into its page cache; see `prefetch`.

    Returns:
        What was read on this rank.

    Raises:
        ValueError: names are missing or unexpected, shapes or dtypes do not fit, or a file is missing, cut short or
            damaged: all that is wrong, on every rank, before any weight is changed. If a file proves unreadable later,
            the model is left half filled.
        NotImplementedError: the weights are quantised in another way than FP8 blocks or MXFP4, which are dequantised.
    """
    folder = Path(folder)

    def make_plan() -> list[Place]:
        inner = _transformers_model(model)
        return plan_places(inner, _recipes(inner, folder), source=folder, strict=strict)

    plan = together(make_plan)
    first = not dist.is_initialized() or dist.get_rank() == 0
    mine = [place for place in plan if first or isinstance(place.tensor, DTensor)]
    ahead = prefetch(partial(needed_by, plan), files_of(plan)) if read_ahead else 0
    meshes = (place.tensor.device_mesh for place in plan if isinstance(place.tensor, DTensor))
    device = device or next((torch.device(mesh.device_type) for mesh in meshes), torch.device("cpu"))
    for place in plan:
        place.make_room(device)
    start = time.perf_counter()
    with OpenFiles() as files:
        together(lambda: _read_all(mine, files, show=first))
    if first:
        seconds, size = time.perf_counter() - start, files.bytes_read / 2**20
        _log.info(f"Read {size:,.0f} MiB of {folder} on rank 0 in {seconds:.1f} s ({size / seconds:,.0f} MiB/s)")
    for place in plan:
        if dist.is_initialized() and not isinstance(place.tensor, DTensor):
            _send(place.target)
        place.settle()
    held = sum(place.bytes_in_file for place in mine)
    return LoadReport(bytes_read=files.bytes_read, bytes_held=held, bytes_ahead=ahead)


def _send(tensor: Tensor) -> None:
    """Give all ranks what rank 0 has; NCCL takes nothing that is on the CPU."""
    on_gpu = tensor.device.type == "cpu" and dist.get_backend() == "nccl"
    sent = tensor.to(torch.device("cuda", torch.cuda.current_device())) if on_gpu else tensor
    dist.broadcast(sent, src=0)
    if sent is not tensor:
        tensor.copy_(sent)


def _transformers_model(model: nn.Module) -> PreTrainedModel:
    found = outermost_models(model)
    if len(found) != 1:
        raise ValueError(
            f"weights of one model fill one model, but in {type(model).__name__} there are {len(found)} of transformers"
            f" {[name for name, _ in found]}; pass the one that is meant"
        )
    return found[0][1]


def _is_checkpoint(path: Path) -> bool:
    """Whether it is a Trainer's, of either form."""
    return path.is_file() or (path / META).exists()


def _recipes(model: PreTrainedModel, source: Path) -> Callable[[Mapping[str, torch.Size]], PlainRecipes]:
    """What makes recipes of the model's tensors out of a folder or a Trainer's checkpoint."""
    if not _is_checkpoint(source):
        quantizer = _quantization(source)
        return lambda shapes: plain_recipes(model, stored_tensors(source), shapes, quantizer)

    def made_of(shapes: Mapping[str, torch.Size]) -> PlainRecipes:
        checkpoint = open_checkpoint(source)
        found = plain_tensors(checkpoint, origin_of(checkpoint))
        known = {name: InCheckpoint(tensor) for name, tensor in found.items() if name in shapes}
        return PlainRecipes(dict(known), unexpected=[name for name in found if name not in shapes])

    return made_of


def _quantization(folder: Path) -> Any:
    """What dequantises the weights of a folder, if they are quantised."""
    config = folder / "config.json"
    if not config.exists():
        raise FileNotFoundError(f"{folder} has no config.json; give the Hugging Face folder of a model")
    return dequantizer(json.loads(config.read_text()).get("quantization_config"), folder)


def _read_all(places: Sequence[Place], files: OpenFiles, *, show: bool) -> None:
    """Fill the targets; in the order of the files, as they are read best."""
    places = sorted(places, key=Place.position)
    total = sum(place.target.numel() * place.target.itemsize for place in places)

    def fill(place: Place) -> int:
        place.recipe.read_into(place.target, place.region, files)
        return place.target.numel() * place.target.itemsize

    with (
        ThreadPoolExecutor(READERS) as pool,
        tqdm(total=total, desc="Reading weights", unit="B", unit_scale=True, disable=None if show else True) as bar,
    ):
        waiting = [pool.submit(fill, place) for place in places]
        try:
            for future in waiting:
                bar.update(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
