"""Ulysses: heads are scattered over the cp ranks and tokens gathered, before attention, and back after it.

Queries, keys and values of this rank's slice go in, `[B, heads, S / cp, D]`; the attention function of transformers
sees some of the heads over whole sequences, `[B, heads / cp, S, D]`; what comes out is its output for the slice again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_ep.dispatch.collectives import Exchange, Splits

PER_HEAD = ("s_aux", "sinks")
"""What attention functions take, or read from the module, one number a head."""

Attention = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Ulysses:
    """The ranks that hold slices of the same sequences, in their order."""

    group: dist.ProcessGroup
    size: int
    rank: int

    # The exchange keeps its own books between forward and backward, which no graph could.
    @torch.compiler.disable
    def __call__(
        self,
        attention: Attention,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        flash: bool,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """What `attention` would return for this rank's tokens, had it all tokens of their sequences.

        Args:
            attention: an attention function of transformers.
            module: the attention module that calls it, with `[B, heads, S / cp, D]` and mask that follow.
            query: and so on; keys and values may have fewer heads, and values another D.
            attention_mask: of whole sequences.
            args: passed on.
            flash: whether `attention` takes packed sequences as cumulative lengths, see `masks.py`.
            options: passed on.

        Returns:
            `[B, S / cp, heads, D]`; weights are not gathered.
        """
        heads, slice_length = query.shape[1], query.shape[2]
        if heads % self.size:
            raise ValueError(
                f"cp={self.size} does not divide the {heads} heads of {type(module).__name__}, which has its heads"
                " scattered over the cp ranks"
            )
        if key.shape[2] != slice_length or value.shape[2] != slice_length:
            raise NotImplementedError(
                f"{type(module).__name__} attends from {slice_length} to {key.shape[2]} tokens; context parallelism"
                " knows attention of sequences to themselves only"
            )
        if options.get("position_bias") is not None:
            raise NotImplementedError(f"{type(module).__name__} adds a bias to each pair of positions; use cp=1")
        whole = slice_length * self.size
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4 and attention_mask.shape[-1] != whole:
            raise RuntimeError(
                f"{type(module).__name__} was given a mask of {attention_mask.shape[-1]} tokens instead of {whole};"
                " call the transformers model that holds it, which makes masks of whole sequences"
            )
        options.pop("position_ids", None)  # of the slice; those of packed sequences come by the mask
        if flash and isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.int32:
            attention_mask, lengths = None, attention_mask
            options |= {"cu_seq_lens_q": lengths[0], "cu_seq_lens_k": lengths[0]}
            options |= {"max_length_q": lengths.shape[0], "max_length_k": lengths.shape[0]}

        repeats = repeats_of(heads, key.shape[1], self.size)
        key, value = (_repeat(tensor, repeats) for tensor in (key, value))
        query, key, value = self._scatter_heads((query, key, value))
        seen: dict[str, Any] = {}
        if hasattr(module, "num_key_value_groups"):
            seen["num_key_value_groups"] = module.num_key_value_groups // repeats
        for name in PER_HEAD:
            if isinstance(getattr(module, name, None), Tensor):
                seen[name] = self._share(getattr(module, name), heads)
            if isinstance(options.get(name), Tensor):
                options[name] = self._share(options[name], heads)
        output, _ = attention(_SomeHeads(module, seen), query, key, value, attention_mask, *args, **options)
        return self._gather_heads(output), None

    def _share(self, per_head: Tensor, heads: int) -> Tensor:
        if per_head.shape != (heads,):
            raise NotImplementedError(f"of {heads} heads, a rank cannot take its share of {list(per_head.shape)} sinks")
        return per_head.chunk(self.size)[self.rank]

    def _scatter_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each `[B, h, s, d]` to `[B, h / cp, cp * s, d]`; in one exchange where they can be put together."""
        batch, _, length, width = tensors[0].shape
        if any((tensor.shape[-1], tensor.dtype) != (width, tensors[0].dtype) for tensor in tensors):
            return [self._scatter_heads([tensor])[0] for tensor in tensors]
        heads = [tensor.shape[1] // self.size for tensor in tensors]
        parts = [t.unflatten(1, (self.size, h)).transpose(0, 1) for t, h in zip(tensors, heads, strict=True)]
        received = self._exchange(torch.cat(parts, dim=2))  # [cp, B, heads, s, d], by the rank whose tokens they are
        whole = received.permute(1, 2, 0, 3, 4).reshape(batch, sum(heads), self.size * length, width)
        return list(whole.split(heads, dim=1))

    def _gather_heads(self, output: Tensor) -> Tensor:
        """`[B, cp * s, h / cp, d]` to `[B, s, h, d]`."""
        batch, length, heads, width = output.shape
        parts = output.unflatten(1, (self.size, length // self.size)).transpose(0, 1)
        received = self._exchange(parts)  # [cp, B, s, h, d], by the rank whose heads they are
        return received.permute(1, 2, 0, 3, 4).reshape(batch, length // self.size, self.size * heads, width)

    def _exchange(self, parts: Tensor) -> Tensor:
        one_each = Splits(send=[1] * self.size, receive=[1] * self.size)
        return Exchange(parts, one_each, self.group).wait()


def repeats_of(heads: int, key_value_heads: int, cp: int) -> int:
    """How often each key and value head is repeated, at the least, for `cp` to divide them."""
    groups = heads // key_value_heads
    return next(r for r in range(1, groups + 1) if groups % r == 0 and key_value_heads * r % cp == 0)


def _repeat(tensor: Tensor, times: int) -> Tensor:
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


class _SomeHeads:
    """An attention module as an attention function sees it that has some of its heads."""

    def __init__(self, module: nn.Module, seen: dict[str, Any]) -> None:
        self._module, self._seen = module, seen

    def __getattr__(self, name: str) -> Any:
        return self._seen[name] if name in self._seen else getattr(self._module, name)
