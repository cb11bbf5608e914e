"""Checks that cost time: freed bytes are overwritten, and what comes back is what left.

Freed bytes become 0xFF, which is NaN in every float format: whoever reads them spoils the loss.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from penstock.errors import PenstockError
from penstock.executor._memory import Block
from penstock.executor._operators import Call
from penstock.executor._places import Stay
from penstock.executor._room import Room
from penstock.graph import StepGraph
from penstock.memory import Tier
from penstock.planner import Plan, Transfer

_POISON = 0xFF


def poison(block: Block) -> None:
    """Overwrite a whole block."""
    block.tensor.fill_(_POISON)


class Debug:
    """Poison and checksums of one plan.

    Args:
        graph: The step.
        plan: A plan for it.
        room: Its memory.
    """

    def __init__(self, graph: StepGraph, plan: Plan, room: Room) -> None:
        self._graph = graph
        self._plan = plan
        self._room = room
        self._freed = _freed(graph, plan)
        self._checksums: dict[tuple[Tier, int, int], int] = {}  # tier, offset, bytes

    def at(self, position: int) -> Iterator[Call]:
        """Overwrite what is freed at a boundary."""
        for offset, num_bytes in self._freed.get(position, ()):
            place = self._room.arena.bytes_at(offset, num_bytes)
            yield lambda place=place: place.fill_(_POISON)

    def watched(
        self,
        transfer: Transfer,
        source: tuple[Tier, int],
        target: tuple[Tier, int],
        move: Callable[[], None],
    ) -> Callable[[], None]:
        """Return a transfer that knows the checksum of what it moves, and compares it."""
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

    def begin_step(self, places: Iterable[tuple[Stay, int]]) -> None:
        """Note what the step begins with below the device: the user may have changed it."""
        for stay, num_bytes in places:
            if stay.tier is not Tier.DEVICE:
                place = (stay.tier, self._room.offset(stay.tier, stay.place))
                self._checksums[(*place, num_bytes)] = self._checksum(*place, num_bytes)

    def _checksum(self, tier: Tier, offset: int, num_bytes: int) -> int:
        return zlib.crc32(self._room.block(tier).bytes_at(offset, num_bytes).cpu().numpy().data)


def _freed(graph: StepGraph, plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """For each boundary the ranges whose values end there, and whom nobody takes over."""
    num_positions = len(plan.order)
    begins = {(p.offset, p.start) for p in plan.placements}
    freed: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for value, offset, num_bytes, _, end in plan.placements:
        boundary = end % num_positions
        storage = graph.storages[graph.storage_of_value[value]]
        name: int | None = value
        if end >= num_positions:
            if not storage.persistent:
                continue  # the loss, which the caller still reads
            name = storage.initial
        operator = graph.operators[plan.order[boundary]]
        handed_over = name in operator.needs or boundary == 0
        if not (handed_over and (offset, boundary) in begins):
            freed[boundary].append((offset, num_bytes))
    return dict(freed)
