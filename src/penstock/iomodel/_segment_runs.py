"""Segments of a plan as they run, and their times by runs of some of the rows.

The rates of chunks or blocks depend on more than a module alone shows: what stays in a
cache between them, how wide a block is, how gradients are added. So such a segment runs with two
numbers of rows r1 < r2 of the whole R, in t1 and t2 seconds, and takes

    t1 + (R - r1) (t2 - t1) / (r2 - r1)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.iomodel._chain import ChainPlan, ChainSegment
from penstock.iomodel._feature_blocks import FeatureBlocks, can_run_in_blocks
from penstock.iomodel._modules import Module, find_parameters, is_plain_linear, run_fused
from penstock.iomodel._row_chunks import ChunkedModules
from penstock.iomodel._timing import Line, time_best

_REPETITIONS = 2
_LEAST_SECONDS = 0.05  # of all repetitions together
_SHARE = 8  # of the rows one eighth runs in blocks, since all blocks have to
_LEAST_ROWS = 64


def make_segment(
    modules: Sequence[Module],
    chunk_rows: int,
    feature_blocks: int | None,
    others: Sequence[Tensor],
    accumulates: bool = False,
    are_flat: bool = False,
) -> ChunkedModules | FeatureBlocks:
    """Return modules that run together.

    Args:
        modules: The modules.
        chunk_rows: Rows of a chunk.
        feature_blocks: Blocks of the features between two linear layers; None or 0: in chunks.
        others: Arguments of the last module beside its rows, by row.
        accumulates: Whether gradients of weights are added to those that the weights have.
        are_flat: Whether the rows have had further dimensions.

    Raises:
        ValueError: The modules do not run in blocks of features.
    """
    if not feature_blocks:
        return ChunkedModules(list(modules), chunk_rows, list(others), accumulates, are_flat)
    first, *middle, last = modules if len(modules) > 1 else [*modules, *modules]
    if not can_run_in_blocks(modules) or not is_plain_linear(first) or not is_plain_linear(last):
        names = ", ".join(type(each).__name__ for each in modules)
        raise ValueError(
            f"feature_blocks is {feature_blocks} for {names}; pass two nn.Linear of different "
            "weights, without hooks, with features and functions of each element such as nn.GELU "
            "between them, or pass chunk_rows"
        )
    return FeatureBlocks(first, middle, last, feature_blocks, accumulates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentRuns:
    """Runs of the segments of a plan.

    Attributes:
        modules: The modules of the chain.
        rows: Its input.
        others: Arguments of the last module beside its rows, by row.
        products: Numbers of the modules that multiply matrices.
        is_step: Whether there is a backward pass.
        needs_rows: Whether the input has a gradient then.
    """

    modules: Sequence[Module]
    rows: Tensor
    others: Sequence[Tensor]
    products: frozenset[int]
    is_step: bool
    needs_rows: bool

    def time(self, plan: ChainPlan) -> ChainPlan:
        """Return the plan with measured times of what runs in chunks or blocks."""
        total = len(self.rows)
        segments = [
            dataclasses.replace(each, seconds=self._time(each).at(total))
            if each.feature_blocks > 1 or each.chunk_rows < total
            else each
            for each in plan.segments
        ]
        return dataclasses.replace(plan, segments=tuple(segments))

    def _time(self, segment: ChainSegment) -> Line:
        total = len(self.rows)
        if segment.feature_blocks > 1:
            many = max(_LEAST_ROWS, total // _SHARE)
        elif self.products & set(segment.operators):
            many = 4 * segment.chunk_rows
        else:  # bound by memory, which the rows of few chunks may not reach
            many = max(4 * segment.chunk_rows, total // _SHARE)
        many = min(many, total)
        few = max(1, many // 2)
        value = self._compute_input(segment, many)
        runs = (functools.partial(self._run, segment, value[:n]) for n in (few, many))
        times = [time_best(run, _REPETITIONS, seconds=_LEAST_SECONDS) for run in runs]
        return Line.through((few, times[0]), (many, times[1]))

    def _compute_input(self, segment: ChainSegment, count: int) -> Tensor:
        """Return a value of the plan's own, as modules may work in place."""
        before, rows = self.modules[: segment.operators[0]], self.rows[:count].clone()
        with torch.no_grad():
            return run_fused(before, rows, []) if before else rows

    def _run(self, segment: ChainSegment, rows: Tensor) -> None:
        chosen = [self.modules[at] for at in segment.operators]
        is_last = segment.operators[-1] == len(self.modules) - 1
        others = [each[: len(rows)] for each in self.others] if is_last else []
        blocks = segment.feature_blocks if segment.feature_blocks > 1 else None
        run = make_segment(chosen, segment.chunk_rows, blocks, others)
        if not self.is_step:
            with torch.no_grad():
                run(rows)
            return
        before = self.modules[: segment.operators[0]]
        is_needed = self.needs_rows or bool(find_parameters(before))
        leaf = rows.detach().requires_grad_(is_needed and rows.is_floating_point())
        with torch.enable_grad():
            result = run(leaf)
        # One operand has all gradients computed, and no hook of the other weights called.
        operands = [each for each in (leaf, *find_parameters(chosen)) if each.requires_grad][:1]
        if result.requires_grad and operands:
            torch.autograd.grad(result, operands, torch.ones_like(result), allow_unused=True)
