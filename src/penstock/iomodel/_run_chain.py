"""Chains of modules that run in chunks of rows, or in blocks of the features between two products.

Each chunk goes through all modules of a segment while its values are in a cache, and none of them
is kept: the backward pass computes them again. Rows are the same bits as unchunked where the
modules' kernels are: elementwise operators, norms, softmaxes. The order in which a product of
matrices adds may depend on how many rows it gets, and gradients of weights are added chunk by
chunk; a product in blocks of features adds block by block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.iomodel._chain import ChainPlan
from penstock.iomodel._levels import check_counts
from penstock.iomodel._modules import Module
from penstock.iomodel._plan_chain import choose_chain, flatten_rows
from penstock.iomodel._segment_runs import make_segment


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
        plan: What `plan_chain` returned for such modules and rows; None: planned here.
        accumulate: Whether `backward()` adds to the weights' `.grad` chunk by chunk, where they
            have one, which takes no memory for a gradient of its own. `torch.autograd.grad` finds
            none of these weights then. Sums over rows, whose gradients are known before
            `backward()`, do without.

    Returns:
        The result, `(..., features)`, or the sum of the numbers.

    Raises:
        TypeError: A module's result is no tensor.
        ValueError: No module, no row, autocast that is on, modules that do not run in blocks of
            features, or a module that drew random numbers, does not work on each row alone, changes
            its buffers, or uses tensors that need gradients and are no parameters of it.
    """
    rows, others = flatten_rows(x, row_args)
    check_counts(modules=len(modules), rows=len(rows))
    _refuse_autocast(x)
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
        in_blocks = blocks if feature_blocks or blocks > 1 else None
        rows = make_segment(chosen, count, in_blocks, extra, accumulate)(rows)
    return rows.reshape(*x.shape[:-1], *rows.shape[1:]) if rows.dim() else rows


def _refuse_autocast(x: Tensor) -> None:
    if torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            "autocast is on, and off where the chain is computed again; call run_chain outside of "
            "it, with modules and x in the dtype to compute in"
        )
