"""Offset assignment: addresses for buffers, as low as possible or below a capacity.

First the fast part: first and best fit along several orders. Where that misses the lower bound (or
the capacity), a search takes over, until it has proven its answer or the time is up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.errors import InfeasibleError, PlanError
from penstock.planner.packing._check import check_overlap
from penstock.planner.packing._native import EngineAnswer, library, pack_fallback, pack_native
from penstock.planner.packing._types import Buffer, BufferLike, Packing, as_buffers
from penstock.units import parse_count, parse_seconds


def pack(
    buffers: Sequence[BufferLike],
    capacity: int | None = None,
    time_limit: float = 60,
    seed: int = 0,
) -> Packing:
    """Assign each buffer an offset, so that buffers that are live at the same time share no byte.

    The search explores canonical packings (M. D. Moffitt, "MiniMalloc", ASPLOS 2023, sections 4 and
    5): buffers are placed in the order of their offsets, each as low as it can lie.

    Example:
        >>> packing = pack([(0, 3, 4), (3, 9, 4), (0, 9, 4), (9, 21, 4), (0, 21, 4)])
        >>> packing.height, packing.lower_bound, packing.optimal
        (12, 12, True)

    Args:
        buffers: `(lower, upper, size)` each, lifetimes half-open, `[lower, upper)`; or `Buffer`
            objects, which may have an alignment, a fixed offset, and gaps in their lifetime.
        capacity: Find any packing that is at most this high. None: find the lowest.
        time_limit: Seconds after which the search ends. The fast part always finishes its first
            order, so there is a packing in any case.
        seed: The result depends on it and on nothing else, unless the time limit ends the search.

    Returns:
        The offsets, in the order of `buffers`, with the height and a lower bound on it.

    Raises:
        InfeasibleError: No packing that fits `capacity` was found; `proved` says whether none
            exists or the time was up, and `minimum_device_bytes` is a capacity that suffices.
        TypeError, ValueError: A buffer, or another argument, has a wrong type or value.
    """
    if capacity is not None:
        capacity = parse_count(capacity, name="capacity")
    time_limit = parse_seconds(time_limit, name="time_limit", may_be_zero=True)
    seed = parse_count(seed, name="seed")
    start = time.perf_counter()
    given = as_buffers(buffers)
    _check_fixed(given)
    # Buffers without bytes fit anywhere; the engines take those with bytes.
    solid = [index for index, buffer in enumerate(given) if buffer.size]
    inner = [given[index] for index in solid]
    compiled = library()
    if not inner:
        packed, found = [], EngineAnswer(0, 0, False, False, 0, 0)
    elif compiled is None:
        packed, found = pack_fallback(inner, capacity=capacity, time_limit=time_limit)
    else:
        packed, found = pack_native(
            compiled, inner, capacity=capacity, time_limit=time_limit, seed=seed
        )
    if capacity is not None and found.height > capacity:
        raise _infeasible(found, capacity, time_limit, has_search=compiled is not None)
    offsets = [buffer.offset or 0 for buffer in given]
    for index, offset in zip(solid, packed, strict=True):
        offsets[index] = offset
    return Packing(
        offsets=tuple(offsets),
        height=found.height,
        lower_bound=found.lower_bound,
        optimal=found.height == found.lower_bound,
        method="search" if found.searched else "best fit",
        engine="python" if compiled is None else "c++",
        num_buffers=len(given),
        num_parts=found.num_parts,
        num_nodes=found.num_nodes,
        pack_seconds=time.perf_counter() - start,
    )


def _check_fixed(buffers: list[Buffer]) -> None:
    spans = [
        (span, buffer.offset, buffer.offset + buffer.size, index)
        for index, buffer in enumerate(buffers)
        if buffer.offset is not None and buffer.size
        for span in buffer.spans
    ]
    try:
        check_overlap(spans)
    except PlanError as error:
        raise ValueError(f"buffers with a fixed offset collide: {error}; move one") from None


def _infeasible(
    found: EngineAnswer, capacity: int, time_limit: float, *, has_search: bool
) -> InfeasibleError:
    known = f"a capacity of {found.height} suffices, and {found.lower_bound} is a lower bound"
    if found.impossible:
        message = f"capacity={capacity}: it is proved that no packing fits; {known}"
    elif has_search:
        message = (
            f"capacity={capacity}: no packing was found within time_limit={time_limit} s, which "
            f"does not mean that there is none; {known}"
        )
    else:
        message = (
            f"capacity={capacity}: best fit found no packing, and without a C++ compiler there is "
            f"no search; install one, or raise the capacity: {known}"
        )
    return InfeasibleError(
        message,
        minimum_device_bytes=found.height,
        sufficient_device_bytes=found.height,
        proved=bool(found.impossible),
    )
