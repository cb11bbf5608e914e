"""Transfers of a plan as functions, on the links that carry them out."""

from __future__ import annotations

from collections.abc import Callable

from penstock.executor.device.links import ThreadLink
from penstock.executor.memory.blocks import FileBlock
from penstock.executor.memory.views import PlanMemory
from penstock.executor.run.debug import Debug
from penstock.memory import Ledger, Link
from penstock.planner import Transfer


def make_links(memory: PlanMemory, ledger: Ledger, debug: Debug | None) -> dict[Link, ThreadLink]:
    """Return the links of a plan; their threads start with the first transfer."""
    links: dict[Link, ThreadLink] = {}
    for link in dict.fromkeys(transfer.link for transfer in memory.plan.transfers):
        transfers = [transfer for transfer in memory.plan.transfers if transfer.link is link]
        links[link] = ThreadLink(
            link,
            [_make_move(memory, transfer, debug) for transfer in transfers],
            [transfer.num_bytes for transfer in transfers],
            ledger,
            memory.blocks.device,
        )
    return links


def _make_move(memory: PlanMemory, transfer: Transfer, debug: Debug | None) -> Callable[[], None]:
    """Return a function that carries out a transfer."""
    value, link, num_bytes, start, _ = transfer
    if not num_bytes:
        return lambda: None
    index, device = memory.index, memory.blocks.device
    source = memory.offset_of(link.source, index.find_source(value, link.source, start))
    target = memory.offset_of(
        link.destination, index.find_destination(value, link.destination, start)
    )
    from_block, to_block = memory.block_of(link.source), memory.block_of(link.destination)
    from_bytes = from_block.bytes_at(source, num_bytes)
    to_bytes = to_block.bytes_at(target, num_bytes)
    if isinstance(to_block, FileBlock):
        move = device.make_write(to_block.write, target, from_bytes)
    elif isinstance(from_block, FileBlock):
        move = device.make_read(from_block.read, source, to_bytes)
    else:
        move = device.make_copy(link, to_bytes, from_bytes)
    if debug is None:
        return move
    return debug.compare_bytes(transfer, (link.source, source), (link.destination, target), move)
