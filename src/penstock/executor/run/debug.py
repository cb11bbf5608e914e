"""Checks that cost time: freed bytes are overwritten, and bytes that come back are compared.

Freed bytes become 0xFF, which is NaN in every float format: an operator that reads them spoils the
loss.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from penstock.errors import PenstockError
from penstock.executor.memory.blocks import PlanMemory
from penstock.executor.memory.residency import ResidencyInterval
from penstock.executor.program.operators import Call
from penstock.graph import StepGraph
from penstock.memory import Tier
from penstock.planner import Plan, Transfer

POISON = 0xFF


class Debug:
    """Poison and checksums of one plan."""

    def __init__(self, memory: PlanMemory) -> None:
        self._memory = memory
        self._freed = _find_freed(memory.graph, memory.plan)
        self._checksums: dict[tuple[Tier, int, int], int] = {}  # tier, offset, bytes

    def poison_freed(self, position: int) -> Iterator[Call]:
        """Yield calls that overwrite the bytes that are freed at a boundary."""
        for offset, num_bytes in self._freed.get(position, ()):
            place = self._memory.arena.bytes_at(offset, num_bytes)
            yield lambda place=place: place.fill_(POISON)

    def compare_bytes(
        self,
        transfer: Transfer,
        source: tuple[Tier, int],
        target: tuple[Tier, int],
        move: Callable[[], None],
    ) -> Callable[[], None]:
        """Return a move that also keeps the checksum of its bytes, and compares them with it."""
        num_bytes = transfer.num_bytes

        def run() -> None:
            known = self._checksums.get((*source, num_bytes))
            move()
            if target[0] is Tier.DEVICE:
                found = self._checksum(*target, num_bytes)
                if known is not None and found != known:
                    raise PenstockError(
                        f"value {transfer.value} came back over {transfer.link.value} with other "
                        f"bytes than it left with (checksum {found:#010x}, was {known:#010x})"
                    )
                return
            if source[0] is Tier.DEVICE:
                known = self._checksum(*source, num_bytes)
            if known is not None:
                self._checksums[(*target, num_bytes)] = known

        return run

    def begin_step(self, places: Iterable[tuple[ResidencyInterval, int]]) -> None:
        """Note the checksums of state below the device, which the user may have changed."""
        for interval, num_bytes in places:
            if interval.tier is not Tier.DEVICE:
                place = (interval.tier, self._memory.offset_of(interval.tier, interval.place))
                self._checksums[(*place, num_bytes)] = self._checksum(*place, num_bytes)

    def _checksum(self, tier: Tier, offset: int, num_bytes: int) -> int:
        content = self._memory.block_of(tier).bytes_at(offset, num_bytes)
        return zlib.crc32(content.cpu().numpy().data)


def _find_freed(graph: StepGraph, plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """Return for each boundary the ranges whose values end there, without in-place reuse."""
    num_positions = len(plan.order)
    begins = {(p.offset, p.start) for p in plan.placements}
    freed: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for value, offset, num_bytes, _, end in plan.placements:
        boundary = end % num_positions
        storage = graph.storage(value)
        name: int | None = value
        if end >= num_positions:
            if not storage.persistent:
                continue  # the loss, which the caller still reads
            name = storage.initial
        operator = graph.operators[plan.order[boundary]]
        is_operand = name in operator.needs or boundary == 0
        if not (is_operand and (offset, boundary) in begins):
            freed[boundary].append((offset, num_bytes))
    return dict(freed)
