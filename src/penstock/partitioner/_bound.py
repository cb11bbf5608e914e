"""A lower bound of the bytes that a rank exchanges under a budget.

Every operator is looked at alone. Let it be split so that a rank needs a share N of an operand and
makes a share M of a result, as a partial sum of r ranks' ones, and let ranks hold shares H at rest:

    received >= B max(0, N - H)                 of an operand of B bytes,
    received >= B max(0, H - M)                 of a result,
    received >= B (r - 1)/n + B max(0, H - M/r)   of a result that is a partial sum of r ranks',

as each of its elements is added up from r pieces, by n ranks. (A result that may rest as a partial
sum is added up by its readers; where these are linear, perhaps after other sums.) Bytes at rest
have a price p, shared by the operators that use a storage. The sum over operators of the least that
each can cost, less p times the budget, is a lower bound for every p >= 0 (Lagrange relaxation of
the budget, and of the agreement of operators on a placement). It holds for all meshes.

That is next to nothing without a budget, where operators disagree freely. So there is a second
bound, of operators that agree, but of one level at a time. Let C(k) be the least exchange of a
split by a single level of k ranks, without a budget and without a price of repeated work: an
optimum of the elimination. In a mesh of levels k_1, ..., k_m, forget all levels but one: what is
left is a split by k_l ranks. A tensor of B bytes that changes its placement there costs B (N - K)
in the mesh (`_mesh`), of which the part of level l is at least

    w_l B (1 - 1/k_l) to gather,  w_l B/k_l (1 - 1/k_l) to trade,  w_l 2B (1 - 1/k_l) to add up,
    w_l = product over the other levels m of 1/k_m,  and again over those with m > l:

N has a factor 1/k_m where level m needs a split, and the part of level l another where level m is
changed after it. So every mesh exchanges at least the sum over its levels of w_l C(k_l). (Products
that other levels might leave without an axis to split are left out of C.)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, inf, prod

import numpy as np

from penstock.partitioner._elimination import Elimination
from penstock.partitioner._level import make_level
from penstock.partitioner._mesh import Mesh
from penstock.partitioner._split import Model
from penstock.partitioner.axes import OperatorAxes, Use, is_heavy

_PRICES = (0.0, *(2.0**power for power in range(-6, 9)))
_ROUNDING = 1e-9  # of sums of costs
_MOST_SPLITS = 4096  # of an operator; one with more counts as free


@dataclass(frozen=True)
class _Ranks:
    """Numbers of ranks that divide all ranks, and the shares that they leave."""

    devices: int
    divisors: tuple[int, ...]
    shares: np.ndarray


def bound_exchanged_bytes(model: Model, devices: int, budget: int | None) -> float:
    """Return a lower bound of the bytes that a rank receives in a step, for any mesh."""
    divisors = tuple(each for each in range(1, devices + 1) if devices % each == 0)
    ranks = _Ranks(devices, divisors, np.array([1 / each for each in divisors]))
    live = model.live_bytes(model.num_bytes)
    place = int(live.argmax()) if len(live) else 0
    counted = model.is_live_before(place)
    users = np.zeros(len(model.num_bytes))
    for axes in model.axes.operators:
        for storage in {use.storage for use in (*axes.inputs, *axes.outputs)}:
            users[storage] += 1
    rest = 0.0  # bytes at rest of storages without a user: at least their smallest pieces
    for storage in np.flatnonzero(counted & (users == 0)):
        rest += model.num_bytes[storage] * _least_share(model, int(storage), devices)
    prices = np.array(_PRICES if budget is not None else (0.0,))
    total = prices * (rest - (budget or 0))
    for members in model.groups.operators:
        total = total + len(members) * _operator_bound(
            model, members[0], ranks, prices, counted / np.maximum(users, 1)
        )
    return max(0.0, float(total.max()))


def bound_by_levels(model: Model, devices: int, deadline: float = inf) -> float:
    """Return a lower bound of the bytes that a rank receives in a step without a budget.

    Args:
        model: The step.
        devices: Number of ranks.
        deadline: By `time.monotonic`; 0 is returned where it passes.
    """
    skipped = frozenset(
        group
        for group, members in enumerate(model.groups.operators)
        if is_heavy(model.graph.operators[members[0]].target)
        and all(size % devices for size in model.axes.operators[members[0]].sizes)
    )
    least: dict[int, float] = {}
    for k in (each for each in range(2, devices + 1) if devices % each == 0):
        if time.monotonic() > deadline:
            return 0.0
        least[k] = _least_of_level(model, k, skipped)

    def bound(left: int, inner: int) -> float:
        """Return the least over all ways to write what is left of the ranks as levels outside."""
        if left == 1:
            return 0.0
        return min(
            k / devices / inner * least[k] + bound(left // k, inner * k)
            for k in least
            if left % k == 0
        )

    return bound(devices, 1)


def _least_of_level(model: Model, k: int, skipped: frozenset[int]) -> float:
    """Return C(k) without some groups of operators; 0 where it is not found exactly."""
    mesh = Mesh((k,), (1.0,))
    level = make_level(model, mesh, None, {}, skipped)
    choices, num = level.choices, len(level.storages)
    for group, members in enumerate(model.groups.operators):
        if group in skipped:
            continue
        work = [model.repeated_work(members, each, mesh) for each in level.operators[group]]
        choices.costs[num + group] -= work
    elimination = Elimination(choices)
    if not elimination.is_exact:
        return 0.0
    value, _ = elimination.solve(0.0, np.zeros(len(choices.num_options), dtype=int))
    return max(0.0, value * (1 - _ROUNDING) - _ROUNDING)


def _least_share(model: Model, storage: int, devices: int) -> float:
    return 1 / gcd(devices, prod(model.extents[storage]) or 1)


def _operator_bound(
    model: Model, operator: int, ranks: _Ranks, prices: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return for each price the least that an operator's exchange and its storages cost."""
    axes = model.axes.operators[operator]
    heavy = is_heavy(model.graph.operators[operator].target)
    best = np.full(len(prices), np.inf)
    for counts in _list_splits(axes, ranks, is_heavy=heavy):
        if counts is None:
            received = [(use, np.zeros(len(ranks.shares))) for use in (*axes.inputs, *axes.outputs)]
        else:
            received = [(use, _count_read(use, counts, ranks)) for use in axes.inputs]
            received += [(use, _count_made(model, use, counts, ranks)) for use in axes.outputs]
        by_storage: dict[int, np.ndarray] = {}
        for use, each in dict(received).items():
            by_storage[use.storage] = by_storage.get(use.storage, 0.0) + each
        total = np.zeros(len(prices))
        for storage, each in by_storage.items():
            held = weights[storage] * model.num_bytes[storage] * ranks.shares
            total += (each[:, None] + prices * held[:, None]).min(axis=0)
        best = np.minimum(best, total)
    return best


def _list_splits(
    axes: OperatorAxes, ranks: _Ranks, *, is_heavy: bool
) -> Iterator[tuple[int, ...] | None]:
    """Yield numbers of pieces for each axis; None for a split that might cost nothing."""
    options = [[d for d in ranks.divisors if extent % d == 0] for extent in axes.sizes]
    if axes.is_linear or prod(map(len, options)) > _MOST_SPLITS:
        yield None
        return
    for counts in itertools.product(*options):
        left, rest = divmod(ranks.devices, prod(counts))
        if rest:
            continue
        could_split = any(
            size // count % left == 0 for size, count in zip(axes.sizes, counts, strict=True)
        )
        if left == 1 or not is_heavy or not could_split:
            yield counts


def _count_read(use: Use, counts: tuple[int, ...], ranks: _Ranks) -> np.ndarray:
    needed = 1 / prod(
        count for count, axis in zip(counts, use.axis_of_loop, strict=True) if axis is not None
    )
    return use.num_bytes * np.maximum(0.0, needed - ranks.shares)


def _count_made(model: Model, use: Use, counts: tuple[int, ...], ranks: _Ranks) -> np.ndarray:
    made = 1 / prod(
        count for count, axis in zip(counts, use.axis_of_loop, strict=True) if axis is not None
    )
    summed = prod(count for axis, count in enumerate(counts) if axis in use.sums)
    if summed == 1:
        return use.num_bytes * np.maximum(0.0, ranks.shares - made)
    if use.storage in model.linearly_read:
        return np.zeros(len(ranks.shares))
    added_up = np.full(len(ranks.shares), (summed - 1) / ranks.devices)
    if not model.may_be_partial(use.storage):
        added_up += np.maximum(0.0, ranks.shares - made / summed)
    return use.num_bytes * added_up
