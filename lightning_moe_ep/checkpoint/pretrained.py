"""Weights from a Hugging Face folder into a model that is sharded already.

Each rank reads the bytes of its own experts and of its share of the rest. All that can be wrong with the names, shapes
and files is found from the files' headers, before a weight is read, and is said on every rank.
"""

from __future__ import annotations

import json
import logging
import math
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from lightning_moe_ep.checkpoint.conversions import PlainRecipes, plain_classes, plain_recipes
from lightning_moe_ep.checkpoint.names import converted_modules
from lightning_moe_ep.checkpoint.prefetch import Span, prefetch
from lightning_moe_ep.checkpoint.recipes import Recipe
from lightning_moe_ep.checkpoint.safetensors_files import OpenFiles, WeightFilesError, stored_tensors, whole
from lightning_moe_ep.checkpoint.unconverted import unconverted
from lightning_moe_ep.shards import part_of

_log = logging.getLogger(__name__)

_WORKERS = 4
"""Threads that read: enough to keep a disk or network busy, few enough that little is held at once."""

_FOLDER = "_pretrained_folder"

_OUTDATED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Buffers that models once saved, and now compute."""

Result = TypeVar("Result")


def build_pretrained(folder: str | Path, auto_class: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """A transformers model for the weights in a folder, on the meta device: the strategy reads them once it is sharded.

    To be called in `configure_model`, in place of `from_pretrained`, which would read the whole model on every rank.

    Args:
        folder: a local Hugging Face folder.
        auto_class: which of transformers' automatic classes builds the model, or a model class.
        options: further arguments of its `from_config`, such as `dtype` or `attn_implementation`. By default the
            dtype is torch's default one, whatever the files have.

    Raises:
        FileNotFoundError: there is no such folder.
        NotImplementedError: the weights are quantised.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"pretrained={str(folder)!r} is not a folder; download the model's files first")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    _check_folder(folder)
    options = {"dtype": torch.get_default_dtype(), **options}
    from_config = getattr(auto_class, "from_config", None) or auto_class._from_config
    with torch.device("meta"):
        model = from_config(config, **options)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    setattr(model, _FOLDER, folder)
    return model


def read_pretrained(module: nn.Module, *, device: torch.device) -> None:
    """Fill the models in `module` that `build_pretrained` made, each from its folder; every rank calls this."""
    for model in module.modules():
        if (folder := vars(model).pop(_FOLDER, None)) is not None:
            load_pretrained(model, folder, device=device)


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
        folder: holds `config.json`, and `model.safetensors` or several such files with their index; seen by all ranks.
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
        NotImplementedError: the weights are quantised.
    """
    folder = Path(folder)

    def make_plan() -> list[_Place]:
        _check_folder(folder)
        return _plan(_transformers_model(model), folder, strict=strict)

    plan = together(make_plan)
    first = not dist.is_initialized() or dist.get_rank() == 0
    mine = [place for place in plan if first or isinstance(place.tensor, DTensor)]
    ahead = prefetch(partial(_needed, plan), _files(plan)) if read_ahead else 0
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
            dist.broadcast(place.target, src=0)
        place.settle()
    held = sum(place.bytes_in_file for place in mine)
    return LoadReport(bytes_read=files.bytes_read, bytes_held=held, bytes_ahead=ahead)


def _transformers_model(model: nn.Module) -> PreTrainedModel:
    found: list[tuple[str, PreTrainedModel]] = []
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found.append((name, module))
    if len(found) != 1:
        raise ValueError(
            f"one folder holds one model, but in {type(model).__name__} there are {len(found)} of transformers"
            f" {[name for name, _ in found]}; pass the one that is meant"
        )
    return found[0][1]


def _check_folder(folder: Path) -> None:
    """Refuse what is no model's folder, and weights that would have to be dequantised."""
    config = folder / "config.json"
    if not config.exists():
        raise FileNotFoundError(f"{folder} has no config.json; give the Hugging Face folder of a model")
    if quantization := json.loads(config.read_text()).get("quantization_config"):
        raise NotImplementedError(
            f"the weights in {folder} are quantised ({quantization.get('quant_method')}), and quantised experts cannot"
            " be trained; dequantise them once, in one process: from_pretrained(folder, quantization_config="
            "C(dequantize=True)).save_pretrained(other_folder), C being transformers' class for that method"
        )


def together(act: Callable[[], Result]) -> Result:
    """Act on every rank; where one fails, all raise.

    Raises:
        Exception: what the first rank that failed has raised, on all.
    """
    error: Exception | None = None
    result = None
    try:
        result = act()
    except Exception as raised:
        error = raised
    if dist.is_initialized():
        errors: list[Exception | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error if error is None or _travels(error) else RuntimeError(str(error)))
        error = error or next((raised for raised in errors if raised is not None), None)
    if error is not None:
        raise error
    return cast(Result, result)


def _travels(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def _plan(model: PreTrainedModel, folder: Path, *, strict: bool) -> list[_Place]:
    """Places for all tensors of the model that the folder has.

    Raises:
        WeightFilesError: names, shapes or dtypes do not match, or the files are no readable ones.
    """
    tensors = model.state_dict(keep_vars=True)
    plain_names = {name: other for name in tensors if (other := _name_without_adapters(name)) is not None}
    converted = converted_modules(model)
    owners = {f"{experts.prefix}{name}": experts for experts in converted for name in experts.parameters}
    shapes = {plain: tensors[name].shape for name, plain in plain_names.items() if name not in owners}
    for experts in converted:
        shapes.update((f"{experts.prefix}{name}", shape) for name, shape in experts.file_shapes.items())
    plain = plain_recipes(model, stored_tensors(folder), shapes)
    recipes = {name: plain.recipes[other] for name, other in plain_names.items() if other in plain.recipes}
    for name, experts in owners.items():
        if (recipe := unconverted(experts, name.removeprefix(experts.prefix), plain.recipes)) is not None:
            recipes[name] = recipe

    places, missing = [], []
    modules = dict(model.named_modules())
    aliases: dict[int, list[str]] = {}
    for name in plain_names:
        aliases.setdefault(id(tensors[name]), []).append(name)
    for names in aliases.values():
        if (found := next((name for name in names if name in recipes), None)) is None:
            missing.append(names[0])
        else:
            slots = [_slot(modules, name) for name in names]
            places.append(_Place(found, tensors[found], slots, recipes[found]))
    problems = _problems(model, plain, shapes, missing, strict=strict)
    if problems := problems or [place.wrong_dtype for place in places if place.wrong_dtype]:
        raise WeightFilesError("\n  ".join([f"{folder} does not fit {_class_name(model)}:", *problems]))
    return places


def _class_name(model: nn.Module) -> str:
    with plain_classes(model):
        return type(model).__name__


def _name_without_adapters(name: str) -> str | None:
    """The name that a tensor has in the model before PEFT wrapped some of its modules; None for an adapter's own."""
    path = [part for part in name.split(".") if part != "base_layer"]
    return None if any(part.startswith("lora_") for part in path) else ".".join(path)


def _slot(modules: Mapping[str, nn.Module], name: str) -> tuple[dict[str, Any], str]:
    owner, _, key = name.rpartition(".")
    module = modules[owner]
    slots: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
    return slots, key


def _problems(
    model: PreTrainedModel,
    plain: PlainRecipes,
    shapes: Mapping[str, torch.Size],
    missing: Sequence[str],
    *,
    strict: bool,
) -> list[str]:
    """All that does not match, a line each."""
    problems = list(plain.errors)
    if strict:
        problems += [
            f"{what}: {name}"
            for what, names, ignored in (
                ("missing", missing, model._keys_to_ignore_on_load_missing),
                ("unexpected", plain.unexpected, {*(model._keys_to_ignore_on_load_unexpected or ()), *_OUTDATED}),
            )
            for name in names
            if not any(re.search(pattern, name) for pattern in ignored or ())
        ]
    for name, recipe in plain.recipes.items():
        if recipe.shape != shapes[name]:
            problems.append(
                f"mis-shaped: {name} is {list(recipe.shape)} in the files, {list(shapes[name])} in the model"
            )
    return problems


class _Place:
    """A tensor of the model, under all the names that it has there, and the recipe that it is made by."""

    def __init__(self, name: str, tensor: Tensor, slots: Sequence[tuple[dict[str, Any], str]], recipe: Recipe) -> None:
        self.name, self.tensor, self.slots, self.recipe = name, tensor, slots, recipe
        self.region = part_of(tensor) if isinstance(tensor, DTensor) else whole(tensor.shape)
        self.target = tensor

    @property
    def wrong_dtype(self) -> str | None:
        """What is wrong with the dtype in the file, if anything."""
        for stored, _ in self.recipe.sources(whole(self.recipe.shape)):
            floats = stored.dtype.is_floating_point and stored.dtype.itemsize > 1
            if floats != self.tensor.is_floating_point() and stored.dtype != self.tensor.dtype:
                return f"{stored.file}: tensor {stored.name} is {stored.dtype}, but {self.name} is {self.tensor.dtype}"
        return None

    @property
    def bytes_in_file(self) -> int:
        """Of this rank's part, in the dtype that the files have."""
        stored = next((tensor for tensor, _ in self.recipe.sources(whole(self.recipe.shape))), None)
        size = stored.dtype.itemsize if stored is not None else 0
        return math.prod(part.stop - part.start for part in self.region) * size

    def position(self) -> tuple[Path, int]:
        """Where the first of what is read is."""
        return next(((stored.file, stored.offset) for stored, _ in self.recipe.sources(self.region)), (Path(), 0))

    def make_room(self, device: torch.device | None) -> None:
        """Have a plain tensor for this rank's part: that of the model, or a new one if it has none yet."""
        local = self.tensor.detach()
        if isinstance(local, DTensor):
            device = device or torch.device(local.device_mesh.device_type)
            local = local._local_tensor
        self.target = torch.empty_like(local, device=device or "cpu") if local.is_meta else local

    def settle(self) -> None:
        """Put what was on the meta device into the model."""
        if not self.tensor.is_meta:
            return
        value: Tensor = self.target
        if isinstance(like := self.tensor, DTensor):
            value = DTensor.from_local(
                value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
            )
        if isinstance(self.tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=self.tensor.requires_grad)
        for slots, key in self.slots:
            slots[key] = value


def _files(plan: Sequence[_Place]) -> list[Path]:
    return sorted({stored.file for place in plan for stored, _ in place.recipe.sources(whole(place.recipe.shape))})


def _needed(plan: Sequence[_Place], rank: int) -> Iterator[Span]:
    """What a rank reads; any rank can tell of any other."""
    for place in plan:
        if isinstance(place.tensor, DTensor):
            coordinate = (place.tensor.device_mesh.mesh == rank).nonzero()[0].tolist()
            region = part_of(place.tensor, coordinate)
        elif rank == 0:
            region = place.region
        else:
            continue
        for stored, part in place.recipe.sources(region):
            for start, length in stored.runs(part):
                yield Span(stored.file, start, start + length)


def _read_all(places: Sequence[_Place], files: OpenFiles, *, show: bool) -> None:
    """Fill the targets; in the order of the files, as they are read best."""
    places = sorted(places, key=_Place.position)
    total = sum(place.target.numel() * place.target.itemsize for place in places)

    def fill(place: _Place) -> int:
        place.recipe.read_into(place.target, place.region, files)
        return place.target.numel() * place.target.itemsize

    with (
        ThreadPoolExecutor(_WORKERS) as pool,
        tqdm(total=total, desc="Reading weights", unit="B", unit_scale=True, disable=None if show else True) as bar,
    ):
        waiting = [pool.submit(fill, place) for place in places]
        try:
            for future in waiting:
                bar.update(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
