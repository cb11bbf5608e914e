"""Prefixes: pools saved to a file, and what a pool that begins with one makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from penstock.kv._blocks import LayerBlocks
from penstock.kv._lower import PageTiers
from penstock.kv._pages import PageTable
from penstock.kv._prefix_file import PrefixFile, PrefixWriter, SavedLayer
from penstock.memory import NewFile
from penstock.memory.pages import DIRECT_IO_BYTES

_Pool = Any  # a BlockPool, whose module imports this one
_Groups = Iterator[tuple[np.ndarray, np.ndarray]]
_GROUP_BYTES = 4 * 2**20  # of keys that are shown to a selector at once


def save_pool(
    pool: _Pool,
    path: str,
    *,
    header: dict[str, Any],
    tensors: Mapping[str, torch.Tensor | None],
) -> None:
    """Save all layers of a pool to a file; pages that sequences share are written once.

    Args:
        pool: The `BlockPool`; what is resident in it is not read from below.
        path: The file, which is replaced.
        header: Further entries of the header, of what JSON has.
        tensors: Further int64 tensors; None is none.

    Raises:
        StoreUnavailableError: The directory is missing, or cannot be written.
        StoreFullError, StoreWriteError: The file could not be written; there is none.
        StoreReadError, PrefixFileError: Tokens could not be read.
    """
    with NewFile(path) as file, pool.platform.use():
        writer = PrefixWriter(file)
        for layer in pool.layers():
            state = pool.blocks(layer)
            pages, table = _number_pages(state.table)
            keys, values = state.tail_parts
            saved = SavedLayer(
                layer,
                dataclasses.replace(state.layout, alignment_bytes=DIRECT_IO_BYTES),
                table,
                keys[:, :, : state.num_tail].contiguous().cpu(),
                values[:, :, : state.num_tail].contiguous().cpu(),
            )
            heads = np.tile(np.arange(state.layout.num_heads), len(pages))
            pages = pages.repeat(state.layout.num_heads)
            writer.add_layer(saved, _groups_in_host(pool, layer, pages, heads))
        writer.finish(header=header, tensors=tensors)


def _groups_in_host(pool: _Pool, layer: int, pages: np.ndarray, heads: np.ndarray) -> _Groups:
    """Yield records of a layer as `BlockPool.stream` does, at addresses that the CPU can read."""
    for items, addresses in pool.stream(layer, pages, heads):
        for some, copies in pool.bring_to_host(addresses, pool.layout(layer).record_bytes):
            yield items[some], copies


def _number_pages(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct pages block after block, as attention reads them, and the table of places."""
    in_order = table.T.ravel()
    distinct, first, place = np.unique(in_order, return_index=True, return_inverse=True)
    is_page = distinct >= 0
    order = np.argsort(first[is_page])
    numbers = np.full(len(distinct), -1, dtype=np.int64)
    numbers[np.flatnonzero(is_page)[order]] = np.arange(len(order))
    pages = distinct[is_page][order]
    return pages, np.ascontiguousarray(numbers[place].reshape(table.T.shape).T)


def begin_with(pool: _Pool, prefix: PrefixFile, pages: PageTable, lower: PageTiers) -> None:
    """Take over the layers of a prefix file, of which no record is read for that."""
    for saved in prefix.layers:
        prefix.check_block_tokens(saved, pool.block_tokens)
        state = pool.make_layer(saved.layer, saved.layout, len(saved.table), None)
        take_layer(saved, state, pages, lower)
    show_blocks(pool)


def take_layer(saved: SavedLayer, state: LayerBlocks, pages: PageTable, lower: PageTiers) -> None:
    """Fill an empty layer with the blocks of a prefix file, which stay there, and its tail."""
    taken = lower.take_prefix(saved)
    state.table = np.append(taken, -1)[saved.table]
    is_page = saved.table >= 0
    pages.references[taken] = np.bincount(saved.table[is_page], minlength=len(taken))
    state.num_tail = saved.tail_keys.shape[2]
    keys, values = state.tail_parts
    keys[:, :, : state.num_tail] = saved.tail_keys
    values[:, :, : state.num_tail] = saved.tail_values


def show_blocks(pool: _Pool) -> None:
    """Show all full blocks to the selectors of their layers, as a prefill would have."""
    for layer in pool.layers():
        selector = pool.selector_of(layer)
        if hasattr(selector, "observe"):
            _show_layer(pool, layer, selector)


def _show_layer(pool: _Pool, layer: int, selector: Any) -> None:
    layout, num_blocks = pool.layout(layer), pool.num_blocks(layer)
    shape = pool.batch_size(layer), layout.num_heads
    block_bytes = shape[0] * shape[1] * layout.key_items * layout.dtype.itemsize
    for first, last in _groups(num_blocks, max(1, _GROUP_BYTES // block_bytes)):
        if getattr(selector, "reads_keys", True):
            keys = pool.keys_of(layer, torch.arange(first, last, device="cpu").expand(*shape, -1))
        else:
            keys = torch.zeros((), dtype=layout.dtype, device=pool.platform.device)
            keys = keys.expand(*shape, last - first, layout.block_tokens, layout.key_dim)
        selector.observe(layer, first, keys)


def _groups(num_blocks: int, num_at_once: int) -> Iterator[tuple[int, int]]:
    for first in range(0, num_blocks, num_at_once):
        yield first, min(first + num_at_once, num_blocks)
