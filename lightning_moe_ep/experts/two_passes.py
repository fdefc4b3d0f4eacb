"""Running code that calls its experts one by one so that the experts may be on other ranks.

The code's own routing stays in force: its forward runs twice. In the first pass each call of an expert is written down
and answered with zeros; all rows then travel to their experts together; in the second pass the calls get their answers.
Where all experts are on this rank one pass is enough, and nothing is assumed of the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial, update_wrapper
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_ep.experts.adapter import Dispatch
from lightning_moe_ep.experts.isolation import random_numbers_from, random_state, without_effects
from lightning_moe_ep.experts.members import StackedMembers, with_tie
from lightning_moe_ep.experts.spread import spread_experts, spread_of
from lightning_moe_ep.experts.stacked import with_zero_gradients
from lightning_moe_ep.remember import once, unremembered
from lightning_moe_ep.trees import map_tensors, tensors_of

Parameters = Callable[[], tuple[dict[str, tuple[Tensor, ...]], list[Tensor]]]
"""This rank's experts: by name, each expert's part of each parameter; and ties (see `with_tie`) of the parameters."""


class OnePass:
    """A block's forward where all of its experts are on this rank."""

    def __init__(self, block: nn.Module, experts: StackedMembers, parameters: Parameters) -> None:
        self._block, self._forward = block, block.forward
        self._experts, self._parameters = experts, parameters
        update_wrapper(self, block.forward, updated=())
        # For calls from elsewhere, such as a checkpoint's around a single expert when it recomputes it.
        experts._answer = lambda number, *args, **kwargs: self._run(parameters()[0], number, *args, **kwargs)

    @torch.compiler.disable  # a block that is compiled would be traced with the rows of one moment
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters, ties = self._parameters()
        numbers: list[int] = []
        sizes: list[int] = []

        def answer(number: int, *args: Any, **kwargs: Any) -> Any:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            numbers.append(number)
            sizes.append(given[0].numel() // self._experts.width_in if given else 0)
            return self._run(parameters, number, *args, **kwargs)

        with self._experts.answering(answer):
            result = self._forward(*args, **kwargs)
        if (spread := spread_of(self._experts)) is not None and spread.watchers:
            index = _index_of_rows(numbers, sizes, next(self._experts.parameters()).device)
            spread.tell(index, torch.ones_like(index, dtype=torch.float32))
        if not any(sizes):
            ties += [*tensors_of((args, kwargs)), *_beside(self._block)]
        return _tied(result, ties)

    def _run(self, parameters: Mapping[str, tuple[Tensor, ...]], number: int, *args: Any, **kwargs: Any) -> Any:
        return self._experts.run({name: parts[number] for name, parts in parameters.items()}, *args, **kwargs)


@dataclass(frozen=True)
class Call:
    """A call of an expert."""

    number: int
    shape: tuple[int, ...]
    """Of its rows, `[..., H]`."""

    @property
    def num_rows(self) -> int:
        return int(torch.Size(self.shape[:-1]).numel())


class TwoPasses:
    """A block's forward where some of its experts are on other ranks.

    The experts' inputs must not depend on their outputs, as they do in a chain of MLPs; and an expert must compute each
    row by itself. Both are tried out, in training and in evaluation, at the first forward in which a rank calls two
    experts. What the block does outside of its own modules, and hooks on these, happen in both passes.
    """

    _FAULTS: ClassVar[tuple[str, ...]] = (
        "what an expert is called with depends on what others gave, as in a chain of MLPs, or is something else when"
        " the block runs again: it is no mixture whose rows can travel together",
        "what an expert gives for a row depends on the other rows, or has another width than before: it is no MLP",
        "the first pass over their block failed on another rank, which says why",
    )

    def __init__(
        self,
        block: nn.Module,
        experts: StackedMembers,
        parameters: Parameters,
        dispatch: Dispatch,
        *,
        name: Callable[[], str],
    ) -> None:
        """
        Args:
            block: whose forward calls the experts.
            experts: in the list's place.
            parameters: this rank's.
            dispatch: reaches all experts.
            name: says which experts these are, in messages.
        """
        self._block, self._forward = block, block.forward
        self._experts, self._parameters, self._dispatch = experts, parameters, dispatch
        self._name = name
        self._checked: set[bool] = set()
        """Whether what it assumes was tried out, in training (True) and in evaluation."""
        update_wrapper(self, block.forward, updated=())

    @torch.compiler.disable  # likewise
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        none = self._no_rows()
        random = random_state(none.device)
        if self._block.training not in self._checked:
            with unremembered():
                self._try_out(args, kwargs, random)
        (tied_args, tied_kwargs), ties = _with_ties((args, kwargs))
        calls, inputs, result = self._rehearse(tied_args, tied_kwargs, self._zeros)
        if self._others:  # whose collectives in the first pass have a backward, too: the same on every rank
            ties += tensors_of(result)
        del result
        if once(lambda: calls) != calls:
            raise RuntimeError(
                f"{self._name()} were called with other rows when activation checkpointing recomputed the forward than"
                " in the forward itself; make the routing deterministic, or leave this block out of checkpointing"
            )
        sizes = [call.num_rows for call in calls]
        # On every rank, whether it calls an expert or not, backward goes from the result by way of the experts to the
        # block's inputs: the same collectives in the same order, before what FSDP2 does once it is through the block.
        rows = with_zero_gradients(_joined(inputs, none), ties)
        del inputs  # copied
        outputs, tie = with_tie(self._send(rows, calls, sizes))
        answers = iter(zip(calls, outputs.split(sizes) if sizes else (), strict=True))

        def answer(number: int, *args: Any, **kwargs: Any) -> Tensor:
            rows = self._rows(args, kwargs)
            call, output = next(answers, (None, None))
            if call is None or output is None or call != Call(number, tuple(rows.shape)):
                raise self._unlike(call)
            # A copy: what is one of several views must not be changed in place, as an expert's output may be.
            return output.view(*rows.shape[:-1], self._experts.width_out).to(rows.dtype, copy=True)

        with random_numbers_from(random, none.device), self._experts.answering(answer):
            result = self._forward(*args, **kwargs)
        if (call := next(answers, (None, None))[0]) is not None:
            raise self._unlike(call)
        return _tied(result, [tie] if len(rows) else [tie, *_beside(self._block)])

    def _send(self, rows: Tensor, calls: list[Call], sizes: list[int]) -> Tensor:
        """The outputs for all rows, by way of their experts."""
        if torch.is_grad_enabled() and not rows.requires_grad:
            rows.requires_grad_()
        index = _index_of_rows([call.number for call in calls], sizes, rows.device)
        return self._dispatch(rows, index, rows.new_ones(len(rows), 1, requires_grad=False))

    @cached_property
    def _others(self) -> list[nn.Module]:
        """Other experts modules in the block."""
        return [experts for experts, _ in spread_experts(self._block) if experts is not self._experts]

    def _rehearse(
        self, args: Any, kwargs: Any, answer: Callable[[Tensor], Tensor]
    ) -> tuple[list[Call], list[Tensor], Any]:
        """Run the forward without effects: which experts it calls, with what, and what it gives."""
        calls: list[Call] = []
        inputs: list[Tensor] = []

        def record(number: int, *args: Any, **kwargs: Any) -> Tensor:
            rows = self._rows(args, kwargs)
            calls.append(Call(number, tuple(rows.shape)))
            # Without autograd, which would not allow it, a buffer may be filled anew for the next call.
            inputs.append(rows if torch.is_grad_enabled() else rows.clone())
            return answer(rows)

        # Copies: a forward may change in place what it is given.
        args, kwargs = map_tensors(torch.clone, (args, kwargs))
        with without_effects(self._block, self._experts), self._experts.answering(record):
            result = self._forward(*args, **kwargs)
        return calls, inputs, result

    def _no_rows(self) -> Tensor:
        """`[0, H]` in the experts' dtype."""
        like = next(self._experts.parameters())
        return torch.empty(0, self._experts.width_in, dtype=like.dtype, device=like.device)

    def _zeros(self, rows: Tensor) -> Tensor:
        return rows.new_zeros((*rows.shape[:-1], self._experts.width_out))

    def _rows(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        given, width = [*args, *kwargs.values()], self._experts.width_in
        if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].shape[-1:] != (width,):
            shown = ", ".join(f"{list(v.shape)}" if isinstance(v, Tensor) else type(v).__name__ for v in given)
            raise TypeError(
                f"{self._name()} were called with ({shown}), but on other ranks they take rows [..., {width}] and"
                " nothing else; apply anything more (routing weights, say) to their outputs, or use ep=1"
            )
        return given[0]

    def _unlike(self, call: Call | None) -> RuntimeError:
        return RuntimeError(
            f"{self._name()} were called otherwise in the second pass over their block than in the first, where"
            f" {f'the next call was {call}' if call else 'there were fewer calls'}; a block that is run twice, to"
            " collect the rows and to hand out the outputs, has to call the same experts with as many rows each time"
            " (is there randomness that is not torch's, or a state outside of the block?). Use ep=1 if it cannot"
        )

    @torch.no_grad()
    def _try_out(self, args: Any, kwargs: Any, random: list[Tensor]) -> None:
        """Try out what `TwoPasses` assumes; every rank of the world comes to the same answer.

        Raises:
            RuntimeError: it does not hold, on any rank.
        """
        device = self._no_rows().device
        fault, failure = 0, None
        calls: list[Call] = []
        try:
            with self._others_answer_zeros(), random_numbers_from(random, device):
                calls, inputs, _ = self._rehearse(args, kwargs, self._zeros)
            with self._others_answer_zeros(), random_numbers_from(random, device):
                other_calls, other_inputs, _ = self._rehearse(args, kwargs, self._noise(device))
            if calls != other_calls or not all(map(_close, inputs, other_inputs)):
                fault = 1
            elif not self._computes_each_row(inputs):
                fault = 2
        except Exception as error:
            fault, failure = 3, error
        seen = sum(call.num_rows > 0 for call in calls) > 1
        told = torch.tensor([fault, seen], device=device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        if failure is not None:
            failure.add_note(f"This came of trying out {self._name()}: their block ran with numbers for their outputs.")
            raise failure
        if fault := int(told[0]):
            raise RuntimeError(
                f"{self._name()} were found as a ModuleList of equal MLPs beside a router, but"
                f" {self._FAULTS[fault - 1]}. Use ep=1, where each call computes by itself, or say what they are with"
                " register_experts"
            )
        if told[1]:
            self._checked.add(self._block.training)

    @contextmanager
    def _others_answer_zeros(self) -> Iterator[None]:
        """Inside, so do other lists of experts in the block: it has a forward like this one for each of them."""

        def answer(width: int, number: int, rows: Tensor) -> Tensor:
            return rows.new_zeros(*rows.shape[:-1], width)

        with ExitStack() as stack:
            for experts in self._others:
                if isinstance(experts, StackedMembers):
                    stack.enter_context(experts.answering(partial(answer, experts.width_out)))
            yield

    def _noise(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Answers as large as the rows, from random numbers of their own."""
        generator = torch.Generator(device).manual_seed(0)

        def noise(rows: Tensor) -> Tensor:
            largest = rows.abs().amax() + 1 if rows.numel() else 1
            values = torch.randn((*rows.shape[:-1], self._experts.width_out), generator=generator, device=device)
            return (values * largest).to(rows.dtype)

        return noise

    def _computes_each_row(self, inputs: list[Tensor]) -> bool:
        rows = _joined(inputs, self._no_rows())[:2]
        if len(rows) < 2:
            return True
        parameters, _ = self._parameters()
        first = {name: parts[0] for name, parts in parameters.items()}
        modes = {module: module.training for module in self._experts.modules()}
        self._experts.eval()  # no dropout
        try:
            together = self._experts.run(first, rows)
            apart = torch.cat([self._experts.run(first, row) for row in rows.split(1)])
        finally:
            for module, mode in modes.items():
                module.training = mode
        return together.shape == (2, self._experts.width_out) and _close(together, apart)


def _index_of_rows(numbers: list[int], sizes: list[int], device: torch.device) -> Tensor:
    """`[R, 1]`: the expert of each row, of calls of the experts `numbers` with so many rows."""
    of_calls = torch.tensor(numbers, dtype=torch.int64, device=device)
    counts = torch.tensor(sizes, dtype=torch.int64, device=device)
    return of_calls.repeat_interleave(counts, output_size=sum(sizes)).unsqueeze(1)


def _joined(inputs: list[Tensor], none: Tensor) -> Tensor:
    """All rows in one `[R, H]`, in the experts' dtype, on every rank the same."""
    return torch.cat([none, *(rows.reshape(-1, none.shape[1]).to(none.dtype) for rows in inputs)])


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape differ by no more than round-off."""
    tolerance = 5e-2 if one.dtype in (torch.bfloat16, torch.float16) else 1e-3
    one, other = (tensor.detach().float().nan_to_num() for tensor in (one, other))
    return not one.numel() or bool((one - other).abs().max() <= tolerance * one.abs().max())


def _beside(block: nn.Module) -> list[nn.Parameter]:
    """The block's other parameters: without rows there may be no gradient for its router, but other ranks have one."""
    inside = {parameter for experts, _ in spread_experts(block) for parameter in experts.parameters()}
    return [parameter for parameter in block.parameters() if parameter not in inside]


def _tied(result: Any, ties: Sequence[Tensor]) -> Any:
    """The block's result, whose backward comes to the experts even where none was called."""

    tied = False

    def tie(tensor: Tensor) -> Tensor:
        nonlocal tied
        if not tensor.is_floating_point():
            return tensor
        tied = True
        # The product is a tensor of its own, which may be changed in place. That it keeps a tensor for backward has
        # activation checkpointing recompute what is before it to the end, collectives included, on every rank.
        return with_zero_gradients(tensor, ties) * tensor.new_ones(())

    if not torch.is_grad_enabled():
        return result
    result = map_tensors(tie, result)
    if not tied:
        raise TypeError(
            f"the forward of a module with experts gave a {type(result).__name__} in which no tensor was found; have it"
            " give tensors, alone or in tuples, lists, dictionaries or outputs of transformers"
        )
    return result


def _with_ties(tree: Any) -> tuple[Any, list[Tensor]]:
    """`tree`, and ties of its tensors that have gradients."""
    ties = []

    def tie(tensor: Tensor) -> Tensor:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        tensor, of_tensor = with_tie(tensor)
        ties.append(of_tensor)
        return tensor

    return map_tensors(tie, tree), ties
