"""Plans of chains of modules, whose times by row and by chunk are measured on this machine.

A product's rate depends on its shape, and a chunk of few rows pays for reading and packing all
weights. So each module runs with two numbers of rows r1 < r2, in t1 and t2 seconds: a row takes
(t2 - t1) / (r2 - r1), a chunk what remains of t1. The memory that a module takes is counted in the
same way. In a step its backward pass is measured beside its forward one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from penstock._lazy import cached_property
from penstock.compat.autograd import outside_saving_hooks
from penstock.compat.dispatch import TorchDispatchMode, are_functorch_transforms_active, tree_leaves
from penstock.compat.random_numbers import keep_random_state
from penstock.iomodel._chain import ChainOperator, ChainPlan, chain
from penstock.iomodel._chain_checks import check_result, refuse_buffer_changes
from penstock.iomodel._chain_operator import Features
from penstock.iomodel._feature_blocks import can_run_in_blocks
from penstock.iomodel._levels import check_counts, this_machine
from penstock.iomodel._module_tensors import ModuleTensors
from penstock.iomodel._modules import (
    Module,
    check_modules,
    find_in_place,
    find_parameters,
    is_plain_linear,
    makes_new_value,
    name_module,
)
from penstock.iomodel._row_chunks import reuse_memory, spare_leaf
from penstock.iomodel._segment_runs import SegmentRuns
from penstock.iomodel._timing import Line, time_best, time_call
from penstock.memory import MachineProfile, find_machine

_PRODUCT_BYTES, _CACHED_BYTES = 16 * 2**20, 2**20  # of the rows that are timed, operand or result
_LEAST_ROWS, _MOST_ROWS = 32, 128  # fewer would not busy all threads
_REPETITIONS = 3
_LEAST_SECONDS = 0.01  # of all repetitions together
_NEW_BYTES = 256 * 2**20  # far more than malloc hands out again, and than caches hold
_BACKWARD_VALUES = 1.5  # a backward pass reads a gradient and what was saved, and writes a gradient


def check_input(modules: Sequence[Module], x: Tensor, row_args: Sequence[Tensor]) -> None:
    """Raise `TypeError` or `ValueError` if a chain cannot run on its input."""
    check_modules(modules)
    names = ("x", *(f"row_args[{number}]" for number in range(len(row_args))))
    for name, each in zip(names, (x, *row_args), strict=True):
        _check_tensor(name, each)
    if x.dim() == 0:
        raise ValueError("x is a number; pass a tensor of rows of features, (..., features)")
    if x.is_complex():
        raise ValueError(
            f"x is {x.dtype}, and chains run in real numbers; pass real and imag parts"
        )
    shape = x.shape[:-1]
    for name, each in zip(names[1:], row_args, strict=True):
        if each.shape[: len(shape)] != shape:
            raise ValueError(
                f"{name} has the shape {tuple(each.shape)}, which does not begin with "
                f"{tuple(shape)}, the rows of x; pass one with an entry for each row"
            )
    check_counts(modules=len(modules), rows=shape.numel())
    if torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            "autocast is on, and off where the chain is computed again; call run_chain and "
            "plan_chain outside of it, with modules and x in the dtype to compute in"
        )
    if are_functorch_transforms_active():
        raise ValueError(
            "a transformation of torch.func (grad, vmap, jvp) is on, and does not reach into "
            "chunks; use torch.autograd.grad around run_chain, or call the modules one after the "
            "other"
        )


def _check_tensor(name: str, value: object) -> None:
    """Refuse what has no numbers by row."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; pass a tensor, by row")
    if value.device.type == "meta":
        raise ValueError(f"{name} is on the device meta; pass a tensor that has numbers")
    if value.layout != torch.strided or value.is_nested:
        raise ValueError(f"{name} is sparse or nested; pass a dense tensor, as of to_dense()")


def flatten_rows(x: Tensor, row_args: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return rows of features, and the other arguments by row."""
    shape = x.shape[:-1]
    rows = x.reshape(shape.numel(), x.shape[-1])
    return rows, [each.reshape(len(rows), *each.shape[len(shape) :]) for each in row_args]


def plan_chain(
    modules: Sequence[Module],
    x: Tensor,
    *row_args: Tensor,
    machine: MachineProfile | str | None = None,
) -> ChainPlan:
    """Plan the chunks of a chain of modules, from runs of its first rows, which are timed.

    Where gradients are needed, the plan is of a step, forward and backward. Chosen chunks and
    blocks of products then run on up to an eighth of the rows, or on four chunks, for their times.

    Args:
        modules: The modules, as `run_chain` takes them.
        x: Its input.
        *row_args: Its other arguments.
        machine: Levels and rates, or the name of a machine; None: those of `penstock.probe`.

    Raises:
        TypeError: A module's result, x or one of `row_args` is no tensor.
        ValueError: No module, no row, complex numbers, autocast that is on, arguments that do not
            fit each other, or a module that changes its buffers.
    """
    check_input(modules, x, row_args)
    with keep_random_state(x.device), outside_saving_hooks():
        plan, runs = _choose(modules, x, row_args, machine)
        return runs.time(plan)


def choose_chain(modules: Sequence[Module], x: Tensor, *row_args: Tensor) -> ChainPlan:
    """Return the plan of `plan_chain`, without runs of what it chooses.

    It is that of the earlier call with the same modules, dtype and shapes: to be computed again, a
    checkpoint has to save what it saved before.
    """
    key = (
        *(x.shape, x.dtype, x.device, x.requires_grad, torch.is_grad_enabled()),
        *(torch.get_num_threads(), bool(find_parameters(modules))),
        *(each.training for each in modules if isinstance(each, nn.Module)),
    )
    try:
        known = _plans.setdefault(modules[0], {})
        used = [weakref.ref(each) for each in modules]
    except TypeError:  # a callable that has no weak references
        known, used = {}, []
    if key not in known or known[key][0] != used:
        with keep_random_state(x.device), outside_saving_hooks():
            known[key] = used, _choose(modules, x, row_args, None)[0]
    return known[key][1]


# By the first module; of the others, weak references are equal while both live.
_plans: MutableMapping[Module, dict[Any, tuple[list[Any], ChainPlan]]] = weakref.WeakKeyDictionary()


def _choose(
    modules: Sequence[Module],
    x: Tensor,
    row_args: Sequence[Tensor],
    machine: MachineProfile | str | None,
) -> tuple[ChainPlan, SegmentRuns]:
    """Return the plan of least cost, and what runs its segments."""
    rows, others = flatten_rows(x.detach(), row_args)
    is_step = torch.is_grad_enabled() and (x.requires_grad or bool(find_parameters(modules)))
    # A copy: modules may work in place, and planning changes nothing of the user's.
    value, operators, products = rows[:_MOST_ROWS].clone(), [], set()
    for number, module in enumerate(modules):
        extra = others if number == len(modules) - 1 else []
        measured = _ModuleRuns(module, [each[: len(value)] for each in extra], is_step)
        with refuse_buffer_changes([module]):
            operator, value, is_product = measured.describe(value, modules[:number])
        operators.append(operator)
        products |= {number} if is_product else set()
    dtypes = {x.dtype, value.dtype, *(each.dtype for each in find_parameters(modules))}
    # Gradients are computed beside the number, and nothing twice, but in float16.
    if value.dim() == 0 and torch.float16 not in dtypes:
        again = {"again_row_seconds": 0.0, "again_chunk_seconds": 0.0}
        operators = [dataclasses.replace(each, **again) for each in operators]
    on_cpu = x.device.type == "cpu"
    plan = chain(
        operators,
        len(rows),
        this_machine() if machine is None else find_machine(machine),
        input_row_bytes=max(1, rows[:1].nbytes),
        num_threads=torch.get_num_threads(),
        new_bytes_per_second=_find_new_rate() if on_cpu else None,
        chunk_new_bytes_per_second=_find_new_rate(in_chunks=True) if on_cpu else None,
    )
    runs = SegmentRuns(
        modules=modules,
        rows=rows,
        others=others,
        products=frozenset(products),
        is_step=is_step,
        needs_rows=x.requires_grad,
    )
    return plan, runs


@functools.cache
def _find_new_rate(*, in_chunks: bool = False) -> float:
    """Return the rate at which memory comes from the operating system and goes back.

    Args:
        in_chunks: Whether as in chunks, by the allocator that they have.

    Returns:
        Bytes per second.
    """

    def time_new() -> float:
        start = time.perf_counter()
        with reuse_memory(torch.device("cpu")) if in_chunks else contextlib.nullcontext():
            tensor = torch.empty(_NEW_BYTES, dtype=torch.uint8, device="cpu")
            tensor.fill_(1)
            again = time_call(functools.partial(tensor.fill_, 1))
            del tensor
        return max(1e-9, time.perf_counter() - start - 2 * again)

    time_new()  # the first one also maps what the allocator keeps
    return _NEW_BYTES / statistics.median(time_new() for _ in range(_REPETITIONS))


@dataclasses.dataclass(frozen=True)
class _ModuleRuns:
    """Runs of a module that are timed.

    Attributes:
        module: The module.
        others: Its arguments beside the rows, by row.
        is_step: Whether there is a backward pass.
    """

    module: Module
    others: list[Tensor]
    is_step: bool

    def describe(
        self, rows: Tensor, before: Sequence[Module]
    ) -> tuple[ChainOperator, Tensor, bool]:
        """Return the module as an operator of a chain, its result, and whether it has products."""
        with torch.no_grad(), _ProductFinder() as products:
            result = self.module(rows, *self.others)
        check_result(self.module, result)
        row_bytes = max(1, result.nbytes // len(rows))
        is_product = products.are_there
        most = _PRODUCT_BYTES if is_product else _CACHED_BYTES
        many = min(len(rows), max(_LEAST_ROWS, most // max(row_bytes, rows[:1].nbytes)))
        counts = max(1, many // 4), many
        forward = self._fit(rows, counts, self._run_forward, _time)
        step = forward
        run = self._run_step if self.is_step else self._run_forward
        if self.is_step:
            step = self._fit(rows, counts, run, _time)
        new = self._fit(rows, counts, run, _count_new_bytes)
        is_fused = not self.is_step and bool(before) and find_in_place(self.module) is not None
        operator = ChainOperator(
            name=name_module(self.module),
            row_bytes=row_bytes,
            row_seconds=step.row,
            chunk_seconds=step.chunk,
            again_row_seconds=forward.row if self.is_step else 0.0,
            again_chunk_seconds=forward.chunk if self.is_step else 0.0,
            value_passes=1 + _BACKWARD_VALUES * self.is_step,
            new_row_bytes=round(new.row),
            can_fuse=is_fused and makes_new_value(before[-1]),
            features=self._find_features(before),
        )
        return operator, result, is_product

    def _find_features(self, before: Sequence[Module]) -> Features:
        if find_in_place(self.module) is not None:
            return "each"
        starts = [*before, self.module]
        pairs = [[each, self.module] for each in before if is_plain_linear(each)]
        is_product = is_plain_linear(starts[-1]) and all(map(can_run_in_blocks, pairs))
        return "product" if is_product else "mixed"

    def _fit(
        self,
        rows: Tensor,
        counts: tuple[int, int],
        run: Callable[[Tensor, list[Tensor]], object],
        measure: Callable[[Callable[[], object]], float],
    ) -> Line:
        few, many = (
            (n, measure(functools.partial(run, rows[:n], [each[:n] for each in self.others])))
            for n in counts
        )
        return Line.through(few, many)

    def _run_forward(self, rows: Tensor, others: list[Tensor]) -> None:
        with torch.no_grad():
            self.module(rows, *others)

    def _run_step(self, rows: Tensor, others: list[Tensor]) -> None:
        """Run forward and backward, as in a chunk."""
        if is_plain_linear(self.module):
            result = self.module(rows).detach()
            torch.mm(result, self.module.weight.detach())
            if self.module.weight.requires_grad:
                self._gradient.addmm_(result.t(), rows)
            return
        leaf = rows.detach().requires_grad_(rows.is_floating_point())
        weights = find_parameters([self.module])
        leaves = {id(each): each.detach().requires_grad_() for each in weights}
        tensors = ModuleTensors([self.module], weights)
        with torch.enable_grad():
            result = tensors.call(self.module, [spare_leaf(self.module, leaf), *others], leaves)
        operands = [each for each in (leaf, *leaves.values()) if each.requires_grad]
        if result.requires_grad and operands:
            if result.shape not in self._seeds:
                self._seeds[result.shape] = torch.ones_like(result)
            torch.autograd.grad(result, operands, self._seeds[result.shape], allow_unused=True)

    @cached_property
    def _seeds(self) -> dict[torch.Size, Tensor]:
        """Gradients of the results, by shape."""
        return {}

    @cached_property
    def _gradient(self) -> Tensor:
        """The sum that a linear layer's gradients are added to."""
        assert isinstance(self.module, nn.Linear)
        return torch.zeros_like(self.module.weight.detach())


def _time(call: Callable[[], object]) -> float:
    return time_best(call, _REPETITIONS, seconds=_LEAST_SECONDS)


def _count_new_bytes(call: Callable[[], object]) -> float:
    with _NewBytes() as counted:
        call()
    return counted.num_bytes


class _ProductFinder(TorchDispatchMode):
    """A look-out for products of matrices, of which torch knows the operations.

    `FlopCounterMode` counts these, but by hooks of all modules, with which none is plain.
    """

    def __init__(self) -> None:
        super().__init__()
        self.are_there = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.are_there |= func._overloadpacket in flop_registry
        return func(*args, **(kwargs or {}))


class _NewBytes(TorchDispatchMode):
    """Bytes of results that are memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        for each in _tensors(result):
            if each.untyped_storage()._cdata not in known:
                self.num_bytes += each.nbytes
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]
