"""Modules that run in chunks of rows, computed again in the backward pass.

The product of a last `nn.Linear` is not computed again: its gradients need its input alone. Of a
sum over rows, such as a loss, the gradients are computed beside it, and nothing twice, for a factor
of 1. What is in float16 waits for the backward pass and its factor: without that, which may be a
loss scale or a mean's divisor, gradients fall out of the range of float16.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.compat.autograd import count_node_hooks, will_accumulate
from penstock.iomodel._chain import REUSED_BYTES
from penstock.iomodel._chain_checks import (
    check_result,
    check_some_rows,
    forbid_second_derivative,
    random_state,
    refuse_random_numbers,
    run_some_rows,
)
from penstock.iomodel._module_tensors import LeavesForWeights, ModuleTensors, find_leaves
from penstock.iomodel._modules import Module, find_parameters, is_plain_linear, run_fused
from penstock.iomodel._row_checks import refuse_mixed_rows
from penstock.memory import CachingAllocator

adding_to_gradients = threading.RLock()  # that weights have: other threads may add to them, too


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkedModules:
    """Modules that run together, chunk by chunk.

    Attributes:
        modules: The modules.
        chunk_rows: Rows of a chunk.
        others: Arguments of the last module beside its rows, by row.
        accumulates: Whether gradients of weights are added to those that the weights have.
        are_flat: Whether the rows had further dimensions, so that they are not what modules get
            that run one after the other: those that mix rows are refused in a single chunk, too.
    """

    modules: list[Module]
    chunk_rows: int
    others: list[Tensor]
    accumulates: bool = False
    are_flat: bool = False

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the result of all rows; whole where that is one chunk."""
        if self.chunk_rows >= len(rows):
            if self.are_flat and len(rows) > 1:
                check_some_rows(self.run, self.modules, rows, self.others)
            result = self.run(rows, self.others)
            check_result(self.modules[-1], result)
            if result.dim() and len(result) != len(rows):
                refuse_mixed_rows()
            return result
        with reuse_memory(rows.device):
            some = run_some_rows(self.run, self.modules, rows, self.others)
            if not torch.is_grad_enabled():
                return self.join(rows, some)
            return _run_in_chunks(self, some, rows, *find_parameters(self.modules))

    def run(self, rows: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return the result of some rows."""
        if not torch.is_grad_enabled():
            return run_fused(self.modules, rows, others)
        for module in self.modules[:-1]:
            rows = module(rows)
        return self.modules[-1](rows, *others)

    def join(self, rows: Tensor, some: Tensor) -> Tensor:
        """Return the results of all chunks, as that of some rows is, or the sum of numbers."""
        if some.dim() == 0:
            total = some.new_zeros((), dtype=find_sum_dtype(some))
            for at, others in self.chunks(rows):
                total = total + self.run(rows[at], others)
            return total.to(some.dtype)
        result = some.new_empty(len(rows), *some.shape[1:])
        for at, others in self.chunks(rows):
            result[at] = _match_rows(self.run(rows[at], others), result[at].shape)
        return result

    def chunks(self, rows: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        for first in range(0, len(rows), self.chunk_rows):
            at = slice(first, first + self.chunk_rows)
            yield at, [each[at] for each in self.others]


def _match_rows(result: Tensor, shape: torch.Size) -> Tensor:
    """Return the result of a chunk in the shape that its rows have in that of all.

    `squeeze()` drops the dimension of a chunk's rows where it has a single one.

    Raises:
        ValueError: They differ by more than dimensions of 1.
    """
    if result.shape == shape:
        return result
    if [each for each in result.shape if each != 1] != [each for each in shape if each != 1]:
        raise ValueError(
            f"the chain's last module returned the shape {tuple(result.shape)} for a chunk, of "
            f"which {tuple(shape)} is expected by what it returned for others; pass one that "
            "returns as many entries for each row of any chunk"
        )
    return result.reshape(shape)


def find_sum_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums over many parts: numbers of 16 bits would stop to grow."""
    return torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype


@contextlib.contextmanager
def plain_mode(device: torch.device) -> Iterator[None]:
    """Compute in the block without gradients, autocast and inference mode, whatever is on."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


@contextlib.contextmanager
def reuse_memory(device: torch.device) -> Iterator[None]:
    """Have the values of a chunk lie in the memory of the chunk before.

    malloc maps a value of 32 MiB or more, and the kernel clears its pages, for each chunk anew.
    Where the allocator cannot be had, malloc is made to keep what is smaller: glibc hands out
    blocks of its heap, whose pages are there, up to the size of the largest mapped block that was
    freed. No page of that block is touched.
    """
    if device.type != "cpu":
        yield
        return
    allocator, is_counted = CachingAllocator.instance(), False
    try:
        is_installed = allocator.acquire()
        is_counted = True
        if not is_installed:
            torch.empty(REUSED_BYTES, dtype=torch.uint8, device="cpu")
        yield
    finally:
        if is_counted:
            allocator.release()


def _run_in_chunks(segment: ChunkedModules, some: Tensor, rows: Tensor, *weights: Tensor) -> Tensor:
    result: Any = _ChunkedSegment.apply(segment, some, rows, *weights)
    return result


class _ChunkedSegment(torch.autograd.Function):
    """A segment whose values are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, segment: ChunkedModules, some: Tensor, rows: Tensor, *weights: Tensor
    ) -> Tensor:
        """Run all chunks; of sums, with the gradients of all operands."""
        state = random_state(rows.device)
        ctx.segment, ctx.is_sum = segment, some.dim() == 0
        ctx.tensors = ModuleTensors(segment.modules, weights)
        # The others are not read from there: a change of theirs in place is noticed.
        ctx.save_for_backward(rows, *segment.others)
        needed, ctx.gradients = ctx.needs_input_grad[2:], None
        dtypes = {rows.dtype, some.dtype, *ctx.tensors.dtypes}
        if ctx.is_sum and any(needed) and torch.float16 not in dtypes:
            total, ctx.gradients = _sum_with_gradients(segment, rows, ctx.tensors, needed)
        else:
            total = segment.join(rows, some)
        if not torch.equal(state, random_state(rows.device)):
            refuse_random_numbers()
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the rows and the weights."""
        (gradient,), rows, device = gradients, ctx.saved_tensors[0], gradients[0].device
        ctx.tensors.check()
        with plain_mode(device), reuse_memory(device):
            found = _differentiate(ctx, rows, ctx.needs_input_grad[2:], gradient)
        if torch.is_grad_enabled():  # create_graph=True
            operands = gradient, rows, *ctx.tensors.weights
            found = [forbid_second_derivative(each, operands) for each in found]
        return None, None, *found


def _differentiate(
    ctx: Any, rows: Tensor, needed: Sequence[bool], gradient: Tensor
) -> list[Tensor | None]:
    segment, tensors = ctx.segment, ctx.tensors
    # Given away, as the next owner may change them; a second pass computes them again.
    found, ctx.gradients = ctx.gradients, None
    if found is None:
        places = [find_gradient(each, segment.accumulates) for each in tensors.weights]
        sums = GradientSums(rows, tensors, needed, places)
        for at, others in segment.chunks(rows):
            sums.add(at, segment, others, gradient if ctx.is_sum else gradient[at])
        found = sums.finish()
    elif not bool(gradient == 1):  # as of a loss, and not worth a pass over each
        found = [None if each is None else each.mul_(gradient) for each in found]
    operands = zip(found, [rows, *tensors.weights], strict=True)
    return [None if each is None else each.to(of.dtype) for each, of in operands]


def _sum_with_gradients(
    segment: ChunkedModules, rows: Tensor, tensors: ModuleTensors, needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the sum over all chunks, and the gradients of rows and weights, not yet rounded."""
    sums, total, dtype = GradientSums(rows, tensors, needed), None, rows.dtype
    for at, others in segment.chunks(rows):
        part = sums.add(at, segment, others, None)
        dtype, part = part.dtype, part.to(find_sum_dtype(part))
        total = part if total is None else total + part
    assert total is not None
    return total.to(dtype), sums.finish()


def find_gradient(weight: Tensor, accumulates: bool) -> Tensor | None:
    """Return the gradient that a weight has, if more may be added to it here; None if not.

    Hooks of a weight are given its gradient, so that it has to be returned, and so has one that
    this backward pass does not add to `.grad`.
    """
    if not accumulates or not weight.is_leaf or not weight.requires_grad or weight.grad is None:
        return None
    if weight.grad.is_inference():  # nothing may be added to it in plain mode
        return None
    if weight.grad.layout != torch.strided:  # a sparse one has no room for all elements
        return None
    return weight.grad if not has_hooks(weight) and will_accumulate(weight) else None


def has_hooks(weight: Tensor) -> bool:
    """Return whether hooks are called where a weight gets a gradient."""
    if not weight.requires_grad:  # frozen since the forward pass
        return False
    hooks = weight._backward_hooks, weight._post_accumulate_grad_hooks
    return any(hooks) or count_node_hooks(weight) > 0


class GradientSums:
    """Gradients of rows, chunk by chunk, and of weights, added over the chunks."""

    def __init__(
        self,
        rows: Tensor,
        tensors: ModuleTensors,
        needed: Sequence[bool],
        places: Sequence[Tensor | None] = (),
    ) -> None:
        tensors.refuse_caches()
        self._rows, self._tensors = rows, tensors
        self._needs_rows = needed[0]
        self._anchor = torch.empty(
            0, dtype=torch.float32, requires_grad=any(needed[1:]), device="cpu"
        )
        self._of_rows = torch.empty_like(rows) if needed[0] else None  # each chunk writes its own
        self._reaches_rows = False
        wanted = zip(tensors.weights, needed[1:], strict=True)
        self._wanted = {id(each): each for each, need in wanted if need}
        weights = places or [None] * len(tensors.weights)
        self._places = {
            id(each): place
            for each, place in zip(tensors.weights, weights, strict=True)
            if place is not None and id(each) in self._wanted
        }
        self._leaves = {key: each.detach().requires_grad_() for key, each in self._wanted.items()}
        # Hooks of a weight itself are called for each gradient of it, and so for each chunk.
        self._hooked = {
            key: each
            for key, each in self._wanted.items()
            if each.requires_grad and each._backward_hooks
        }
        self._sums: dict[int, Tensor] = {}

    def _find_sum(self, key: int) -> Tensor | None:
        """Return a weight's sum, made for the first gradient; None for one that needs none."""
        if key in self._wanted and key not in self._sums:
            place, weight = self._places.get(key), self._wanted[key]
            dtype = find_sum_dtype(weight)
            if place is None or place.dtype != dtype:
                place = torch.zeros_like(weight, dtype=dtype)
            self._sums[key] = place
        return self._sums.get(key)

    def finish(self) -> list[Tensor | None]:
        """Return the gradients in the dtype of sums, but for those added to what was there before.

        A weight that no row used has none, unless it has hooks, which autograd would call with
        None.
        """
        found = [self._of_rows if self._reaches_rows else None]
        for weight in self._tensors.weights:
            key = id(weight)
            place, of_weight = self._places.get(key), self._sums.get(key)
            if of_weight is None and key in self._wanted and has_hooks(weight):
                of_weight = self._find_sum(key)
            if place is not None and of_weight is not None and place is not of_weight:
                with adding_to_gradients:
                    place.add_(of_weight)
            found.append(None if place is not None else of_weight)
        return found

    def add(
        self, at: slice, segment: ChunkedModules, others: Sequence[Tensor], gradient: Tensor | None
    ) -> Tensor:
        """Add the gradients of a chunk, computed again, and return its result."""
        *firsts, last = segment.modules
        with torch.enable_grad():
            rows = value = self._rows[at].detach().requires_grad_(self._needs_rows)
            for module in firsts:
                value = self._run(module, value, [])
            if gradient is not None and firsts and is_plain_linear(last):
                self.add_linear(last, value.detach(), gradient)
                gradient = gradient @ self.find_weight(last)
            else:
                value = self._run(last, value, others)
        if gradient is not None:  # whose rows may be a dimension that the chunk has lost
            gradient = gradient.reshape(value.shape)
        if value.requires_grad:
            self._add_gradients(at, rows, value, gradient)
        elif self._of_rows is not None:
            self._of_rows[at] = 0
        return value.detach()

    def _add_gradients(
        self, at: slice, rows: Tensor, value: Tensor, gradient: Tensor | None
    ) -> None:
        leaves = find_leaves(value) if self._hooked else ()
        if reached := [each for each in leaves if id(each) in self._hooked]:
            raise RuntimeError(
                f"a weight of the shape {tuple(reached[0].shape)} has hooks, which would be called "
                "for each chunk of the chain: a scripted module or an autograd.Function uses it as "
                "it is; leave that out of the chain, or change .grad after backward() instead"
            )
        # A module that keeps its weights elsewhere, too, may have used them and not the leaves.
        weights = {
            key: each
            for key, each in self._wanted.items()
            if each.requires_grad and key not in self._hooked
        }
        keys = [*self._leaves, *weights]
        operands = [*self._leaves.values(), *weights.values()]
        firsts = [rows] if self._needs_rows else []
        anchors = [self._anchor] if self._wanted else []
        graded = torch.autograd.grad(
            value, firsts + operands + anchors, gradient, allow_unused=True
        )
        if self._of_rows is not None:
            self._of_rows[at] = 0 if graded[0] is None else graded[0]
            self._reaches_rows |= graded[0] is not None
        for key, each in zip(keys, graded[len(firsts) :], strict=False):
            total = None if each is None else self._find_sum(key)
            if total is not None:
                with adding_to_gradients:
                    total.add_(each)

    def _run(self, module: Module, value: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Run a module; a linear layer adds the gradients of its weights where they are summed."""
        if is_plain_linear(module) and not others:
            result: Any = _SummingLinear.apply(self, module, value, self._anchor)
            return result
        swaps = LeavesForWeights(self._leaves) if self._hooked else contextlib.nullcontext()
        with swaps:
            return self._tensors.call(module, [spare_leaf(module, value), *others], self._leaves)

    def run_linear(self, module: nn.Linear, value: Tensor) -> Tensor:
        """Return the output of a linear layer with its weights of the forward pass."""
        bias = self._tensors.find(module, "bias")[1]
        return torch.nn.functional.linear(value, self.find_weight(module), bias)

    def find_weight(self, module: nn.Linear) -> Tensor:
        """Return the weight of a linear layer in the forward pass."""
        weight = self._tensors.find(module, "weight")[1]
        assert weight is not None
        return weight

    def add_linear(self, module: nn.Linear, value: Tensor, gradient: Tensor) -> None:
        """Add the gradients of a linear layer to the sums, without a matrix of their own."""
        value, gradient = (each.reshape(-1, each.shape[-1]) for each in (value, gradient))
        of_weight = self._find_sum(self._tensors.find(module, "weight")[0])
        of_bias = self._find_sum(self._tensors.find(module, "bias")[0])
        with adding_to_gradients:
            if of_weight is not None and of_weight.dtype == value.dtype:
                of_weight.addmm_(gradient.t(), value)
            elif of_weight is not None:
                of_weight.add_(gradient.t() @ value)
            if of_bias is not None:
                of_bias.add_(gradient.sum(0, dtype=of_bias.dtype))


def spare_leaf(module: Module, value: Tensor) -> Tensor:
    """Return a value that a module may work on in place: a leaf of autograd must not change."""
    is_changed = value.requires_grad and value.is_leaf and getattr(module, "inplace", False)
    return value.clone() if is_changed else value


class _SummingLinear(torch.autograd.Function):
    """A linear layer whose backward pass adds to sums of gradients."""

    @staticmethod
    def forward(ctx: Any, sums: GradientSums, module: nn.Linear, value: Tensor, *_: Any) -> Tensor:
        """Compute the layer's output.

        Autograd goes through it for an anchor's sake: for weights, which are no arguments here, it
        would call their hooks for each chunk.
        """
        ctx.sums, ctx.module = sums, module
        ctx.save_for_backward(value)
        return sums.run_linear(module, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the value, and add those of the weights."""
        (gradient,), (value,) = gradients, ctx.saved_tensors
        ctx.sums.add_linear(ctx.module, value, gradient)
        if not ctx.needs_input_grad[2]:
            return None, None, None, None
        return None, None, gradient @ ctx.sums.find_weight(ctx.module), None
