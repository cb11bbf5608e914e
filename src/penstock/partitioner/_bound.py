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
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

import numpy as np

from penstock.partitioner._split import Model
from penstock.partitioner.axes import OperatorAxes, Use, is_heavy

_PRICES = (0.0, *(2.0**power for power in range(-6, 9)))
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
    counted = (model.first <= place) & (place < model.last)
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
