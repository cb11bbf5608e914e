"""Pairs from both ends of a spectrum, solved for one after the other and orthonormal together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.spectral._basis import gram
from penstock.spectral._problem import StandardProblem
from penstock.spectral._refinement import solve_projected
from penstock.spectral._report import Eigenpairs, add_reports

_LEAST_SHARE = 1e-6  # of a start's squared norm: below, it lies in the span of what was found


def solve_ends(
    problem: StandardProblem, solve: Callable[[StandardProblem], Eigenpairs]
) -> Eigenpairs:
    """Return the pairs of `which="BE"`, or of "LM" where those may lie at both ends.

    Of one eigenspace each end may find some vectors, which are orthonormal among themselves only.

    Args:
        problem: The problem.
        solve: Solves a problem of one end.
    """
    k, is_both = problem.k, problem.which == "BE"
    # Of both ends together there are never more pairs than rows, so that none comes twice.
    num_low, num_high = (k // 2, k - k // 2) if is_both else (k, k)
    num_high = min(num_high, problem.operator.global_length - num_low)
    low = solve(dataclasses.replace(problem, which="SA", k=num_low))
    start = _remove_span(problem, low.vectors.T)
    high = solve(dataclasses.replace(problem, which="LA", k=num_high, start=start))
    values = torch.cat([low.values, high.values])
    residuals = torch.cat([low.residuals, high.residuals])
    x = torch.cat([low.vectors.T, high.vectors.T])
    first = num_low
    if not is_both:
        chosen = values.abs().argsort(descending=True)[:k].sort().values
        values, x, residuals = values[chosen], x[chosen.to(x.device)], residuals[chosen]
        first = int((chosen < num_low).sum())
    if 0 < first < k and _overlap(problem, x[:first], x[first:]):
        values, x, residuals = solve_projected(
            problem.operator, x, block=problem.operator.block, reduce=problem.reduce
        )
    order = values.argsort()
    report = dataclasses.replace(
        add_reports(low.report, high.report), num_products=problem.operator.num_products
    )
    return Eigenpairs(values[order], x[order.to(x.device)].T, residuals[order], report)


def _overlap(problem: StandardProblem, low: Tensor, high: Tensor) -> bool:
    """Return whether vectors of the two ends are not orthogonal to each other."""
    limit = torch.finfo(low.dtype).eps ** (2 / 3)
    return float(problem.reduce(gram(low, high)).abs().max()) > limit


def _remove_span(problem: StandardProblem, x: Tensor) -> Tensor | None:
    """Return the vectors to begin with less their parts in the span of orthonormal vectors.

    With those, what both ends have of one eigenspace would be the same vector.
    """
    start = problem.start
    if start is None:
        return None
    left = start - problem.reduce(gram(x, start)).T.to(x.dtype) @ x
    before, after = (problem.reduce(gram(each, each)).diagonal().real for each in (start, left))
    left = left[after > _LEAST_SHARE * before]
    return left if len(left) else None
