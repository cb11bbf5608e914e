"""Checks that modules compute in chunks what they compute at once, by some of the rows.

A few rows, from everywhere, run before the chunks. Modules that mix rows, count them, draw random
numbers or use weights of others show it there, and are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.compat.autograd import outside_saving_hooks
from penstock.compat.dynamo import run_uncompiled
from penstock.compat.modules import read_version, refuse_changed_buffers
from penstock.compat.random_numbers import keep_random_state, random_state
from penstock.iomodel._captured_values import list_kept_results
from penstock.iomodel._module_tensors import find_leaves
from penstock.iomodel._modules import name_module
from penstock.iomodel._row_checks import Run, check_beside_others, check_rows, choose_rows
from penstock.iomodel._sum_checks import check_sum


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
    some, of_some = choose_rows(rows, others)
    needs_rows = rows.requires_grad and torch.is_grad_enabled()
    leaf = some.clone().requires_grad_(needs_rows)
    given = leaf.clone()  # which a module may change in place
    state, version = random_state(rows.device), read_version(given)
    with keep_random_state(rows.device), refuse_buffer_changes(modules), outside_saving_hooks():
        result = run(given, of_some)
        check_result(modules[-1], result)
        is_random = not torch.equal(state, random_state(rows.device))
    if torch.is_grad_enabled():
        if read_version(given) != version:
            _refuse_changed_input()
        if is_random:
            refuse_random_numbers()
        _check_leaves(result, modules, others, leaf)
        _check_kept(run, modules, given, of_some)
    if is_random and result.dim() == 0:
        raise ValueError(
            "a module of the chain drew random numbers for a number, of which no part then shows "
            "whether it is a sum over its rows; leave dropout out of the chain, or set its modules "
            "to eval()"
        )
    with torch.no_grad(), refuse_buffer_changes(modules):
        _compare(run, result.detach(), rows, others, is_random)
    return result.detach()


@run_uncompiled(reason="what the rows are decides what is refused")
def check_some_rows(
    run: Run, modules: Sequence[Any], rows: Tensor, others: Sequence[Tensor]
) -> None:
    """Refuse modules that mix rows, as `run_some_rows` does; no random number counts as drawn."""
    some, of_some = choose_rows(rows, others)
    state = random_state(rows.device)
    with keep_random_state(rows.device), torch.no_grad(), refuse_buffer_changes(modules):
        result = run(some.clone(), of_some)
        check_result(modules[-1], result)
        is_random = not torch.equal(state, random_state(rows.device))
        if result.dim() or not is_random:
            _compare(run, result, rows, others, is_random)


def _compare(
    run: Run, result: Tensor, rows: Tensor, others: Sequence[Tensor], is_random: bool
) -> None:
    """Compare the result of some rows with those of other ones; there are no gradients here."""
    if result.dim() == 0:
        check_sum(run, result, rows, others)
    elif is_random:
        check_beside_others(run, *choose_rows(rows, others))
    else:
        check_rows(run, result, *choose_rows(rows, others))


def refuse_buffer_changes(modules: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    """Return a context that raises if modules have changed their buffers by the end."""
    return refuse_changed_buffers(
        modules,
        "a module of the chain changes its buffers, as of batches and not of rows; leave it out of "
        "the chain, or set it to eval()",
    )


def check_result(module: object, result: object) -> None:
    """Raise `TypeError` if a module of a chain returned no tensor."""
    if not isinstance(result, Tensor):
        raise TypeError(
            f"{name_module(module)} returned a {type(result).__name__}, but a module of a chain "
            "must return one tensor; take it out of the result in a function"
        )


def refuse_random_numbers() -> None:
    """Raise `ValueError`: the backward pass would draw others."""
    raise ValueError(
        "a module of the chain drew random numbers, which would differ in the backward pass; leave "
        "dropout out of the chain, or set its modules to eval()"
    )


def _refuse_changed_input() -> None:
    raise ValueError(
        "a module of the chain changes x in place, and would do so again in the backward pass; "
        "begin the chain after it, or with inplace=False"
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


def _check_leaves(
    result: Tensor, modules: Iterable[Any], others: Sequence[Tensor], rows: Tensor
) -> None:
    """Refuse tensors that need gradients, and would get none in silence."""
    known = {id(each) for of in modules if isinstance(of, nn.Module) for each in of.parameters()}
    known.add(id(rows))
    hidden = [each for each in others if each.requires_grad]
    hidden += [each for each in find_leaves(result) if id(each) not in known]
    if hidden:
        raise ValueError(
            f"a tensor of the shape {tuple(hidden[0].shape)} needs a gradient, and is neither x "
            "nor a parameter of the chain's modules: make it a parameter of an nn.Module in the "
            "chain, or detach() it"
        )


def _check_kept(run: Run, modules: Sequence[Any], rows: Tensor, others: Sequence[Tensor]) -> None:
    """Refuse modules that keep a result of rows with its graph, which would get no gradient.

    A part of a loss is such a result. What is made of weights alone is the same for other rows, and
    what has a row for each is taken to be kept for looks.
    """
    before = list_kept_results(modules)
    if not before:
        return
    device = rows.device
    with keep_random_state(device), refuse_buffer_changes(modules), outside_saving_hooks():
        run(rows[1:].clone(), [each[1:] for each in others])
    after = list_kept_results(modules)
    if len(before) != len(after) or not all(
        _is_of_weights(one, other) or _is_by_row(one, other, len(rows))
        for one, other in zip(before, after, strict=True)
    ):
        raise ValueError(
            "a module of the chain keeps a result of its rows that needs a gradient, as a part of "
            "a loss: it would be that of one chunk, and get no gradient; return it, detach() it, "
            "or leave the module out of the chain"
        )


def _is_of_weights(one: Tensor, other: Tensor) -> bool:
    """Return whether a result is the same for other rows."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _is_by_row(one: Tensor, other: Tensor, num_rows: int) -> bool:
    """Return whether a result has a row for each, as a value that is kept to look at it."""
    return one.shape[:1] == (num_rows,) and other.shape[:1] == (num_rows - 1,)
