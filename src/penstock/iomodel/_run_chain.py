"""Chains of modules that run in chunks of rows, or in blocks of the features between two products.

Each chunk goes through all modules of a segment while its values are in a cache, and none of them
is kept: the backward pass computes them again. Rows are the same bits as unchunked where the
modules' kernels are: elementwise operators, norms, softmaxes. The order in which a product of
matrices adds may depend on how many rows it gets, and gradients of weights are added chunk by
chunk; a product in blocks of features adds block by block.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.iomodel._chain import ChainPlan
from penstock.iomodel._feature_blocks import can_run_in_blocks
from penstock.iomodel._levels import check_counts
from penstock.iomodel._modules import Module
from penstock.iomodel._plan_chain import check_input, choose_chain, flatten_rows
from penstock.iomodel._segment_runs import make_segment
from penstock.iomodel._sequence_checks import check_sequences


def run_chain(
    modules: Sequence[Module],
    x: Tensor,
    *row_args: Tensor,
    chunk_rows: int | None = None,
    feature_blocks: int | None = None,
    plan: ChainPlan | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Run modules one after the other on the rows of x, in chunks.

    Example:
        >>> run_chain([nn.Linear(8, 32), nn.GELU()], torch.rand(2, 50, 8), chunk_rows=16).shape
        torch.Size([2, 50, 32])

    Args:
        modules: Modules or functions that work on each row alone and draw no random numbers. The
            last one may return a number: the sum over its rows, such as a loss.
        x: Input, `(..., features)`; rows are all dimensions but the last.
        *row_args: Further arguments of the last module, such as labels, with a row for each of x.
        chunk_rows: Rows of a chunk of all modules together; None: as `plan` has it.
        feature_blocks: Blocks of the features between two linear layers, which the modules begin
            and end with, in place of chunks; None: as `plan` has it.
        plan: What `plan_chain` returned for such modules and rows; None: planned in the first call
            with these modules, dtype and shape.
        accumulate: Whether `backward()` adds to the weights' `.grad` chunk by chunk, where they
            have one, which takes no memory for a gradient of its own. An exception in the middle
            of the pass leaves a part of them added. Sums over rows whose gradients are known
            before `backward()`, as they are but in float16, and passes that leave `.grad` alone
            (`torch.autograd.grad`, `backward(inputs=)` without the weight) do without.

    Returns:
        The result, `(..., features)`, or the sum of the numbers.

    Raises:
        TypeError: A module's result, x or one of `row_args` is no tensor, or `plan` no plan.
        ValueError: No module, no row, complex numbers, autocast or a transformation of `torch.func`
            that is on, arguments that do not fit each other, modules that do not run in blocks of
            features, or a module that drew random numbers, does not work on each row alone, changes
            its buffers or its first operand, or uses tensors that need gradients and are no
            parameters of it.
        RuntimeError: In the backward pass: weights, buffers or `training` have changed since, a
            scripted module or an `autograd.Function` uses a weight that has hooks, or
            `parametrize.cached` is on for one.
    """
    check_input(modules, x, row_args)
    rows, others = flatten_rows(x, row_args)
    _check_choice(modules, others, plan, chunk_rows, feature_blocks)
    if x.dim() > 2:
        check_sequences(modules[:-1] if others else modules, x)
    everything = tuple(range(len(modules)))
    if feature_blocks is not None:
        check_counts(feature_blocks=feature_blocks)
        segments = [(everything, len(rows), feature_blocks)]
    elif chunk_rows is not None:
        check_counts(chunk_rows=chunk_rows)
        segments = [(everything, chunk_rows, 1)]
    else:
        plan = plan or choose_chain(modules, x, *row_args)
        segments = [
            (each.operators, each.chunk_rows, each.feature_blocks) for each in plan.segments
        ]
    for at, count, blocks in segments:
        chosen = [modules[number] for number in at]
        extra = others if at[-1] == len(modules) - 1 else []
        # Modules of a plan have other hooks by now, where these do not run in blocks.
        is_blocked = feature_blocks or (blocks > 1 and can_run_in_blocks(chosen))
        in_blocks = blocks if is_blocked else None
        rows = make_segment(chosen, count, in_blocks, extra, accumulate, x.dim() > 2)(rows)
    return rows.reshape(*x.shape[:-1], *rows.shape[1:]) if rows.dim() else rows


def _check_choice(
    modules: Sequence[Module],
    others: Sequence[Tensor],
    plan: ChainPlan | None,
    chunk_rows: int | None,
    feature_blocks: int | None,
) -> None:
    """Refuse arguments that do not go together."""
    given = {"plan": plan, "chunk_rows": chunk_rows, "feature_blocks": feature_blocks}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} are given; each says how to run: pass one of them")
    if feature_blocks is not None and others:
        raise ValueError(
            f"feature_blocks is {feature_blocks}, and the last module has {len(others)} other "
            "arguments, which a linear layer does not take; pass chunk_rows"
        )
    if plan is None:
        return
    if not isinstance(plan, ChainPlan):
        raise TypeError(f"plan is {plan!r}; pass what plan_chain returned for these modules")
    planned = sorted(at for each in plan.segments for at in each.operators)
    if planned != list(range(len(modules))):
        raise ValueError(
            f"plan has {len(planned)} modules, and modules are {len(modules)}; pass what "
            "plan_chain returned for these modules"
        )
