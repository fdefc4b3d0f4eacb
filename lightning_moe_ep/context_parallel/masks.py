"""Masks of whole sequences, in a model that is given slices of them.

The model's forward is called with this rank's slice of ids, mask and positions. Before it runs, the cp ranks tell each
other mask and positions; while it runs, transformers' mask functions make masks of the whole sequences from these. A
model is always given a mask, so that transformers looks for no packed sequences in a slice's positions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, wraps
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import (
    and_masks,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
)

CALL = "call `batch = strategy.shard_sequences(batch)` before the model"


@dataclass(frozen=True)
class WholeSequences:
    """What the sequences are of which the running forward has slices."""

    length: int
    """Tokens of a slice."""

    whole_length: int

    mask: Tensor | None = None
    """`[B, S]` bool; None: nothing is padding."""

    causal_mask: Tensor | None = None
    """The same where no token sees a later one: None also if all padding is the rounding to a multiple of cp."""

    positions: Tensor | None = None
    """`[B, S]`; None: no row has more than one sequence."""

    sequence_ids: Tensor | None = None
    """`[B, S]`, alike for the tokens of one sequence; None as above."""

    last: Tensor | None = None
    """The largest position; None: not known."""

    @cached_property
    def lengths(self) -> Tensor:
        """What flash attention is told of several sequences in a row: where each begins and the last ends.

        `[n + 1]` int32, expanded to `[longest, n + 1]`, so that the longest needs no wait for the device in each layer.
        """
        assert self.sequence_ids is not None
        begins = F.pad(self.sequence_ids.diff(dim=-1) != 0, (1, 0), value=True)
        if self.mask is not None:  # what is padding is a sequence of its own
            begins |= F.pad(self.mask.diff(dim=-1) != 0, (1, 0))
        starts = begins.flatten().nonzero().flatten()
        ends = torch.cat([starts, starts.new_tensor([begins.numel()])]).int()
        return ends.expand(int(ends.diff().max()), -1)


_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_SKIPS = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
"""Whether a mask function may leave a mask out."""

_running: ContextVar[WholeSequences | None] = ContextVar("whole_sequences", default=None)


@dataclass(frozen=True)
class TellsSequences:
    """What is around the forward of a transformers model whose attention is spread."""

    group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    keep_registered: Callable[[], None]
    """Called before each forward: what transformers' registers name may have been registered anew."""
    masks: bool
    """Whether attention can have a mask."""

    def install(self, model: nn.Module) -> None:
        forward = model.forward
        parameters = signature(forward).parameters
        takes_use_cache = "use_cache" in parameters or any(
            each.kind is each.VAR_KEYWORD for each in parameters.values()
        )

        # Not hooks: torch runs none of them after an interrupt, and masks of that forward would be taken for the next.
        @wraps(forward)
        def telling(*args: Any, **kwargs: Any) -> Any:
            if _running.get() is not None:  # inside another transformers model, which has told
                return forward(*args, **kwargs)
            given = {**dict(zip(parameters, args, strict=False)), **kwargs}
            token = _running.set(self._tell(model, given))
            if takes_use_cache:
                given["use_cache"] = False
            try:
                return forward(**given)
            finally:
                _running.reset(token)

        model.forward = telling

    def _tell(self, model: nn.Module, given: dict[str, Any]) -> WholeSequences:
        """What the sequences are of which all ranks have slices; the model is given a mask where it has none."""
        self.keep_registered()
        problem = _problem(model, given)
        mask, positions = (given.get(name) for name in ("attention_mask", "position_ids"))
        tokens = _tokens(given)
        shape = (-1, -1) if problem is not None or tokens is None else tokens.shape[:2]
        _agree(problem, shape, self.host_group)
        assert tokens is not None and positions is not None
        if mask is None:
            mask = torch.ones(shape, dtype=torch.long, device=tokens.device)
        given["attention_mask"] = mask
        sequences = _whole_sequences(given.get("input_ids"), mask, positions, self.group)
        if not self.masks and (sequences.causal_mask is not None or sequences.positions is not None):
            raise NotImplementedError(
                f"cp_mode='ring' knows one whole sequence a row, but these have"
                f" {'padding' if sequences.positions is None else 'several in a row'}; use cp_mode='ulysses'"
            )
        return sequences


def _tokens(given: dict[str, Any]) -> Tensor | None:
    return given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")


def _problem(model: nn.Module, given: dict[str, Any]) -> str | None:
    """What is wrong with a forward's arguments on this rank."""
    tokens = _tokens(given)
    if tokens is None:
        return "context parallelism needs input_ids or inputs_embeds"
    shape = tuple(tokens.shape[:2])
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is None:
        return f"at cp > 1 the model must be told the positions of its slice; {CALL}, which gives position_ids"
    if positions.ndim not in (2, 3) or tuple(positions.shape[-2:]) != shape:
        return f"position_ids {list(positions.shape)} are not those of tokens {list(shape)}; {CALL}"
    if mask is not None and (not isinstance(mask, Tensor) or tuple(mask.shape) != shape):
        what = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        return f"attention_mask {what} is not one of tokens {list(shape)}; at cp > 1, give the slice's 2-D mask: {CALL}"
    if given.get("use_cache") or given.get("cache") is not None or given.get("past_key_values") is not None:
        return "a cache of keys and values (use_cache, generate) holds no slices of sequences; use cp=1 for it"
    if given.get("output_attentions", getattr(model.config, "output_attentions", False)):
        return "output_attentions=True: attention weights are spread over the cp ranks; use cp=1 for them"
    if lengths := [name for name in _LENGTHS if given.get(name) is not None]:
        return f"{', '.join(lengths)}: at cp > 1, packed sequences are told by position_ids that begin anew, and {CALL}"
    if given.get("labels") is not None and given.get("shift_labels") is None:
        return (
            f"labels would be shifted within the slice, and its last token have none; {CALL}, which shifts them first"
        )
    return None


def _agree(problem: str | None, shape: tuple[int, ...], group: dist.ProcessGroup) -> None:
    """Raise on every rank of the group if something is wrong on one; over the host, before what could hang."""
    mine = torch.tensor([problem is None, *shape], dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    failed = [rank for rank, theirs in zip(ranks, everyone, strict=True) if not theirs[0]]
    if problem is not None:
        raise ValueError(problem)
    if failed:
        raise ValueError(f"rank(s) {failed}, which hold slices of the same sequences as this one, refused their batch")
    shapes = [theirs[1:].tolist() for theirs in everyone]
    if any(other != shapes[0] for other in shapes):
        raise ValueError(
            f"ranks {ranks} hold slices of the same sequences, but of {shapes} tokens; give them all the same batch,"
            f" and {CALL}"
        )


def _whole_sequences(ids: Tensor | None, mask: Tensor, positions: Tensor, group: dist.ProcessGroup) -> WholeSequences:
    """Gather what the ranks of the group know of their sequences; one wait for the device."""
    batch, length = mask.shape
    cp = group.size()
    if positions.ndim == 3 and len(positions) == 4:
        positions = positions[0]  # transformers: that of the text, before those of three axes
    marks_packing = positions.ndim == 2  # those of several axes are places in pictures
    known = [
        mask.long(),
        positions.long() if marks_packing else mask.long(),
        mask.long() if ids is None else ids.long(),
    ]
    mine = torch.stack(known)
    gathered = mine.new_empty((cp * len(mine), batch, length))
    dist.all_gather_single(gathered, mine, group=group)
    gathered = gathered.unflatten(0, (cp, len(mine)))
    whole_mask, whole_positions, _ = gathered.permute(1, 2, 0, 3).reshape(3, batch, cp * length).unbind()
    whole_mask = whole_mask.bool()
    if whole_mask.numel() == 0:
        return WholeSequences(length, cp * length)
    not_rounding = torch.arange(cp * length, device=mask.device) < cp * length - cp + 1
    begins = whole_positions.diff(dim=-1) != 1
    in_order = (whole_mask[:, 1:] <= whole_mask[:, :-1]).all()
    facts = [
        marks_packing & begins.any(),
        whole_mask.all(),
        in_order & (whole_mask | ~not_rounding).all(),
        (gathered == gathered[:1]).all() & whole_mask.any(),
    ]
    packed, unpadded, rounded, alike = torch.stack(facts).tolist()
    if alike and ids is not None and marks_packing and length > 1:
        raise ValueError(
            f"the {cp} ranks that hold slices of the same sequences were given the same tokens at the same positions:"
            f" whole sequences, not slices; {CALL}"
        )
    return WholeSequences(
        length=length,
        whole_length=cp * length,
        mask=None if unpadded else whole_mask,
        causal_mask=None if unpadded or rounded else whole_mask,
        positions=whole_positions if packed else None,
        sequence_ids=F.pad(begins.cumsum(dim=-1), (1, 0)) if packed else None,
        last=whole_positions.where(whole_mask | not_rounding, 0).max() if marks_packing else None,
    )


def whole_mask(make: Callable[..., Any], *, flash: bool, **options: Any) -> Any:
    """What the mask function `make` makes of whole sequences, in a forward that has slices of them."""
    sequences = _running.get()
    if sequences is None:
        return make(**options)
    lengths = [options["q_length"], options["kv_length"]]
    if lengths != [sequences.length] * 2 or options.get("q_offset", 0) or options.get("kv_offset", 0):
        raise NotImplementedError(f"a mask of {lengths} tokens, where slices have {sequences.length}; use cp=1")
    function = options["mask_function"]
    if options.get("use_vmap") or _holds_tensor(function):
        raise NotImplementedError(
            "a mask that depends on more than places in the sequence knows a slice only; use cp=1"
        )
    causal = "allow_is_bidirectional_skip" not in options
    options |= {"q_length": sequences.whole_length, "kv_length": sequences.whole_length}
    options["attention_mask"] = sequences.causal_mask if causal else sequences.mask
    # transformers tells packed sequences apart in causal masks only, and some families not even in these.
    if sequences.positions is not None and sequences.sequence_ids is not None:
        if flash:
            return sequences.lengths
        options["mask_function"] = and_masks(
            remap_positions_for_packed_sequence(function, sequences.positions),
            packed_sequence_mask_function(sequences.sequence_ids),
        )
        options |= {name: False for name in _SKIPS if name in options}
    return make(**options)


def tell_last_position(rotary: nn.Module) -> None:
    """Have rotary embeddings, whose frequencies depend on the largest position, know that of the whole sequences."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sequences = _running.get()
        if sequences is None:
            return None
        if sequences.last is None:
            raise NotImplementedError("rotary embeddings that depend on length know no positions of several axes")
        given = {**dict(zip(signature(module.forward).parameters, args, strict=False)), **kwargs}
        positions = given["position_ids"]
        last = sequences.last.to(positions.dtype)
        # None is larger but those of the rounding to a multiple of cp, which one process would not have.
        positions = torch.cat([positions.clamp(max=last), last.expand(*positions.shape[:-1], 1)], dim=-1)
        return (), {**given, "position_ids": positions}

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if _running.get() is None:
            return None
        if isinstance(output, Tensor):
            return output[..., :-1, :]
        return tuple(each[..., :-1, :] for each in output)

    rotary.register_forward_pre_hook(before, with_kwargs=True)
    rotary.register_forward_hook(after)


def _holds_tensor(function: Callable[..., Any]) -> bool:
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    held = [each for one in held for each in (one if isinstance(one, tuple) else (one,))]
    return any(isinstance(one, Tensor) or (hasattr(one, "__closure__") and _holds_tensor(one)) for one in held)
