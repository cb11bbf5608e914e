"""Checks that modules compute in chunks what they compute at once, by some of the rows.

A few rows, from everywhere, run before the chunks. Modules that mix rows, count them, draw random
numbers or use weights of others show it there, and are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.compat.autograd import outside_saving_hooks
from penstock.compat.dynamo import run_uncompiled

Run = Callable[[Tensor, Sequence[Tensor]], Tensor]
_NUM_ROWS = 8
# Of the largest number, by dtype: sums in another order differ by less
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE = 0.05  # of numbers of 16 bits


@run_uncompiled(reason="what the rows are decides what is refused")
def run_some_rows(
    run: Run, modules: Sequence[Any], rows: Tensor, others: Sequence[Tensor]
) -> Tensor:
    """Return the result of a few rows, or the sum over them, of modules that can run in chunks.

    Args:
        run: Runs all modules on rows, with the further arguments of the last one.
        modules: The modules.
        rows: All rows, at least 2.
        others: Further arguments of the last module, by row.

    Raises:
        TypeError: The result is no tensor.
        ValueError: The modules would compute something else in chunks.
    """
    some, of_some = _choose_rows(rows, others)
    given = some.clone()  # which a module may change in place
    state, version = random_state(rows.device), _version(given)
    with refuse_buffer_changes(modules), outside_saving_hooks():
        result = run(given, of_some)
    check_result(modules[-1], result)
    if torch.is_grad_enabled() and _version(given) != version:
        raise ValueError(
            "a module of the chain changes x in place, and would do so again in the backward "
            "pass; begin the chain after it, or with inplace=False"
        )
    is_random = not torch.equal(state, random_state(rows.device))
    if torch.is_grad_enabled():
        if is_random:
            refuse_random_numbers()
        _check_leaves(result, modules, others)
    result = result.detach()
    check = _check_random_rows if is_random else _check_rows
    check(run, result, some, of_some)
    return result


@run_uncompiled(reason="what the rows are decides what is refused")
def check_some_rows(
    run: Run, modules: Sequence[Any], rows: Tensor, others: Sequence[Tensor]
) -> None:
    """Refuse modules that mix rows, as `run_some_rows` does; no random number counts as drawn."""
    some, of_some = _choose_rows(rows, others)
    state = random_state(rows.device)
    with keep_random_state(rows.device), torch.no_grad(), refuse_buffer_changes(modules):
        result = run(some.clone(), of_some)
        check_result(modules[-1], result)
        is_random = not torch.equal(state, random_state(rows.device))
        check = _check_random_rows if is_random else _check_rows
        check(run, result, some, of_some)


def _choose_rows(rows: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a few rows, evenly, first and last included."""
    num_rows = min(_NUM_ROWS, len(rows))
    at = torch.arange(num_rows, device=rows.device) * (len(rows) - 1) // (num_rows - 1)
    return rows.detach()[at], [each[at] for each in others]


@contextlib.contextmanager
def refuse_buffer_changes(modules: Iterable[Any]) -> Iterator[None]:
    """Raise `ValueError` if modules have changed their buffers by the end."""
    modules = list(modules)
    kept = _buffer_versions(modules)
    yield
    if kept != _buffer_versions(modules):
        raise ValueError(
            "a module of the chain changes its buffers, as of batches and not of rows; leave it "
            "out of the chain, or set it to eval()"
        )


def check_result(module: object, result: object) -> None:
    """Raise `TypeError` if a module of a chain returned no tensor."""
    if not isinstance(result, Tensor):
        name = getattr(module, "__name__", type(module).__name__)
        raise TypeError(
            f"{name} returned a {type(result).__name__}, but a module of a chain must return one "
            "tensor; take it out of the result in a function"
        )


def random_state(device: torch.device) -> Tensor:
    """Return the state of the random numbers that modules draw for a device."""
    state = torch.get_rng_state()
    if device.type != "cuda":
        return state
    return torch.cat([state, torch.cuda.get_rng_state(device)])


def keep_random_state(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context at whose end random numbers go on as if none had been drawn in it."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def refuse_random_numbers() -> None:
    """Raise `ValueError`: the backward pass would draw others."""
    raise ValueError(
        "a module of the chain drew random numbers, which would differ in the backward pass; leave "
        "dropout out of the chain, or set its modules to eval()"
    )


def forbid_second_derivative(gradient: Tensor | None, operands: Sequence[Tensor]) -> Tensor | None:
    """Return a gradient of operands whose own gradient is refused, and not taken for 0."""
    found: Any = None if gradient is None else _FirstDerivative.apply(gradient, *operands)
    return found


class _FirstDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *_: Tensor) -> Tensor:
        """Return the gradient."""
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Refuse."""
        raise RuntimeError(
            "the gradients of penstock.iomodel.run_chain have no gradients of their own: for "
            "second derivatives call the modules one after the other"
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _buffer_versions(modules: Iterable[Any]) -> list[tuple[int, int]]:
    buffers = (b for each in modules if isinstance(each, nn.Module) for b in each.buffers())
    return [(id(each), each._version) for each in buffers if not each.is_inference()]


def _check_leaves(result: Tensor, modules: Iterable[Any], others: Sequence[Tensor]) -> None:
    """Refuse tensors that need gradients, and would get none in silence."""
    known = {id(each) for of in modules if isinstance(of, nn.Module) for each in of.parameters()}
    hidden = [each for each in others if each.requires_grad]
    hidden += [each for each in _find_leaves(result) if id(each) not in known]
    if hidden:
        raise ValueError(
            f"a tensor of the shape {tuple(hidden[0].shape)} needs a gradient, and is neither x "
            "nor a parameter of the chain's modules: make it a parameter of an nn.Module in the "
            "chain, or detach() it"
        )


def _find_leaves(result: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of a result's graph that need gradients."""
    stack, seen = [result.grad_fn], set()
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        stack += [each for each, _ in node.next_functions]


def _check_rows(run: Run, result: Tensor, some: Tensor, others: Sequence[Tensor]) -> None:
    """Refuse results that are not of each row alone, or no sum over rows."""
    count = len(some)
    with torch.no_grad():
        if result.dim() == 0:
            middle = count // 3 + 1  # of two, one each; a mean of unequal parts is no sum
            first = run(some[:middle].clone(), [each[:middle] for each in others])
            second = run(some[middle:].clone(), [each[middle:] for each in others])
            if not _differ(first + second, result):
                return
            raise ValueError(
                f"the number that the chain's last module returned is no sum over its rows: "
                f"{float(result):.4g} of {count} rows, {float(first):.4g} and {float(second):.4g} "
                "of two parts of them; pass one that adds, as with reduction='sum', and divide the "
                "result by the rows"
            )
        # The rows turned around, and without the first of them
        found = run(some[1:].flip(0), [each[1:].flip(0) for each in others])
        expected = result[1:].flip(0)
        is_by_row = len(result) == count and found.shape == expected.shape
        if is_by_row and not _differ(found, expected):
            return
    _refuse_mixed_rows()


def _check_random_rows(run: Run, result: Tensor, some: Tensor, others: Sequence[Tensor]) -> None:
    """Refuse results of rows that change, by the same random numbers, with the first and last."""
    if result.dim() == 0:
        return
    turned = torch.cat([some[-1:], some[1:-1], some[:1]])
    with torch.no_grad():
        found = []
        for rows in (some, turned):
            with keep_random_state(some.device):
                found.append(run(rows.clone(), others))
    inner, of_turned = (each[1:-1] for each in found)
    if len(result) != len(some) or _differ(of_turned, inner):
        _refuse_mixed_rows()


def _refuse_mixed_rows() -> None:
    raise ValueError(
        "a module of the chain does not work on each row alone: a row's result depends on the rows "
        "beside it; leave out what reduces, sorts or normalises over rows"
    )


def _differ(found: Tensor, expected: Tensor) -> bool:
    """Return whether numbers differ by more than sums of floats do."""
    if not expected.is_floating_point():
        return False  # an index of equals may be any of them
    tolerance = _TOLERANCES.get(expected.dtype, _TOLERANCE)
    found, expected = found.double(), expected.double()
    if not torch.equal(found.isnan(), expected.isnan()):
        return True
    most = expected[expected.isfinite()].abs().max() if expected.isfinite().any() else 0.0
    return bool(((found - expected).abs() > tolerance * most).any())
