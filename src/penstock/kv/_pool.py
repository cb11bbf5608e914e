"""Pool of blocks: keys and values of all layers, over the tiers.

A layer's table says which page is which block of each sequence; sequences share pages, as beams do.
The newest, unfinished block of every sequence (the tail) never leaves the device and is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch

from penstock.errors import InfeasibleError, PenstockError
from penstock.kv._blocks import BlockWrites, LayerBlocks
from penstock.kv._device import DeviceTier
from penstock.kv._kernel import copy_pieces
from penstock.kv._layout import BlockLayout
from penstock.kv._lower import PageTable, PageTiers
from penstock.kv._reads import BlockReads
from penstock.kv._report import PoolReport
from penstock.kv._resident import ResidentLayer
from penstock.kv._selector import name_of, resolve_selector
from penstock.memory import FileStore, Ledger, Link, Tier
from penstock.memory.pages import DIRECT_IO_BYTES
from penstock.units import format_bytes, parse_bytes

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class BlockPool:
    """Keys and values in blocks, over a device tier with a hard budget and tiers below.

    Example:
        >>> pool = BlockPool(device_memory="1MiB")
        >>> pool.append(0, torch.rand(1, 2, 100, 16), torch.rand(1, 2, 100, 16))
        >>> pool.length(0), pool.num_blocks(0)
        (100, 1)
        >>> pool.close()

    Args:
        device_memory: Budget of resident blocks and staging, as an int or text such as `"2GiB"`.
            The unfinished block of each sequence and layer is beyond it.
        host_memory: The most bytes of host memory below; None: as much as is needed, or none where
            there is a store.
        store: Directory, or `FileStore`, of the file below; None: no file.
        block_tokens: Tokens of a block, T.
        device: `"cpu"`, where the device tier is the RAM of the budget.
        num_layers: Layers that will come, where known: then a budget below one block per layer is
            refused at the first `append`.
        selector: Blocks that steps of few tokens read, as of `penstock.kv.cache`.
        selected_layers: Layers that the selector is asked for; None: all.

    Raises:
        ValueError, TypeError: A size is none, or the device is not the CPU.
        StoreUnavailableError: The directory cannot be used.
    """

    def __init__(
        self,
        *,
        device_memory: int | str,
        host_memory: int | str | None = None,
        store: FileStore | str | None = None,
        block_tokens: int = 64,
        device: torch.device | str = "cpu",
        num_layers: int = 1,
        selector: object = "all",
        selected_layers: Collection[int] | None = None,
    ) -> None:
        if torch.device(device).type != "cpu":
            raise ValueError(f"device must be 'cpu', the only one that is supported; got {device}")
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1; got {block_tokens}")
        self.block_tokens = block_tokens
        self._selector = resolve_selector(selector)
        self._selected_layers = selected_layers
        self.ledger = Ledger()
        self._num_layers = num_layers
        self._alignment_bytes = 64 if store is None else DIRECT_IO_BYTES
        self._layers: dict[int, LayerBlocks] = {}
        self._resident: dict[int, ResidentLayer] = {}
        self._pages = PageTable()
        budget_bytes = parse_bytes(device_memory, name="device_memory")
        host_bytes = None if host_memory is None else parse_bytes(host_memory, name="host_memory")
        if host_memory is None and store is not None:
            host_bytes = 0
        self._lower = PageTiers(self._pages, self.ledger, host_bytes, store)
        self._device = DeviceTier(
            budget_bytes, self._pages, self._lower, self.ledger, half_life=64 * num_layers
        )
        self._reads = BlockReads(self._pages, self._device, self._lower, self.ledger)
        self._writes = BlockWrites(self._pages, self._device, self._lower)
        self._failure: BaseException | None = None
        self._closed = False

    def layers(self) -> list[int]:
        """Return the numbers of the layers that were appended to."""
        return sorted(self._layers)

    def layout(self, layer: int) -> BlockLayout:
        """Return the shapes of a layer's blocks."""
        return self._layers[layer].layout

    def blocks(self, layer: int) -> LayerBlocks:
        """Return the blocks of a layer, to be read only."""
        return self._layers[layer]

    def batch_size(self, layer: int) -> int:
        """Return the number of sequences; 0 before the first `append`."""
        return self._layers[layer].batch_size if layer in self._layers else 0

    def selector_of(self, layer: int) -> Any:
        """Return the selector that is asked for a layer; None where all blocks are read."""
        is_selected = self._selected_layers is None or layer in self._selected_layers
        return self._selector if is_selected else None

    def length(self, layer: int) -> int:
        """Return the number of tokens of a layer's sequences."""
        return self._layers[layer].num_tokens if layer in self._layers else 0

    def num_blocks(self, layer: int) -> int:
        """Return the number of full blocks of a layer's sequences."""
        return self._layers[layer].num_blocks if layer in self._layers else 0

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, *, keep_from: int = 0
    ) -> None:
        """Add tokens to a layer.

        Args:
            layer: Number of the layer.
            keys: `(B, H, n, key_dim)` in float32, float16 or bfloat16.
            values: `(B, H, n, value_dim)` of the same dtype.
            keep_from: Blocks that end before this token are not kept.

        Raises:
            ValueError, TypeError: Shapes or dtypes do not fit those of earlier calls.
            InfeasibleError: The budget is below one block per layer; nothing was stored.
            CapacityError, StoreFullError, StoreError: A tier below refuses; the pool cannot be
                used after that, except for `reset` and `close`.
        """
        self.check_usable()
        state = self._layer_for(layer, keys, values)
        try:
            self._append(layer, state, keys, values, keep_from)
        except BaseException as error:
            self._failure = error
            raise

    def crop(self, num_tokens: int, layers: list[int] | None = None) -> None:
        """Keep the first tokens of every sequence and forget the others.

        Args:
            num_tokens: How many to keep; nothing happens where a layer has no more.
            layers: Layers to crop; None: all.

        Raises:
            ValueError: The tokens before are not there: the layer keeps a window only.
        """
        self.check_usable()
        if num_tokens < 0:
            raise ValueError(f"num_tokens must be at least 0; got {num_tokens}")
        for layer in self.layers() if layers is None else layers:
            state = self._layers.get(layer)
            if state is not None and num_tokens < state.num_tokens:
                self._crop(layer, state, num_tokens)
        self._tell_selector("crop", layers, num_tokens // self.block_tokens)

    def reorder(self, index: torch.Tensor, layers: list[int] | None = None) -> None:
        """Make sequence i a copy of sequence `index[i]`; full blocks are shared, not copied.

        Args:
            index: int64 `(any number,)`: that many sequences there are afterwards.
            layers: Layers to reorder; None: all.

        Raises:
            IndexError: There is no such sequence.
        """
        self.check_usable()
        chosen = index.detach().cpu().numpy().astype(np.int64)
        for layer in self.layers() if layers is None else layers:
            state = self._layers.get(layer)
            if state is not None:
                self._reorder(state, chosen)
        self._tell_selector("reorder", layers, index)

    def repeat(self, repeats: int, layers: list[int] | None = None) -> None:
        """Make every sequence `repeats` sequences, one after the other.

        Raises:
            ValueError: `repeats` is below 1.
        """
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1; got {repeats}")
        sizes = {
            self.batch_size(layer) for layer in self._layers if layers is None or layer in layers
        }
        if len(sizes) == 1:
            self.reorder(torch.arange(sizes.pop()).repeat_interleave(repeats), layers)

    def drop_before(self, layer: int, token: int) -> None:
        """Forget the blocks of a layer that end before a token; their numbers stay taken."""
        state = self._layers.get(layer)
        if state is not None:
            end = min(max(0, token // self.block_tokens), state.num_blocks)
            self._release(state.layout, state.table[:, :end])
            state.table[:, :end] = -1

    def reset(self, layers: list[int] | None = None) -> None:
        """Forget all tokens."""
        self._check_open()
        self._device.settle()
        self._failure = self._lower.failure = None
        for layer in self.layers() if layers is None else layers:
            state = self._layers.pop(layer, None)
            if state is not None:
                self._release(state.layout, state.table)
                self.ledger.add(Tier.DEVICE, -state.tail_bytes)
        self._tell_selector("crop", layers, 0)
        if not self._layers:
            self._device.set_selector_bytes(int(getattr(self._selector, "nbytes", 0)))
            self._device.restart()

    def keys_of(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return the keys of full blocks, wherever they are.

        Args:
            layer: Number of the layer.
            blocks: int64 `(B, H, k)` as `select` returns them.

        Returns:
            `(B, H, k, block_tokens, key_dim)`; zeros where `blocks` is -1.
        """
        state = self._layers[layer]
        layout = state.layout
        shape = (*blocks.shape, layout.record_items)
        records = torch.zeros(shape, dtype=layout.dtype)
        b, h, c = np.nonzero(blocks.numpy() >= 0)
        places = np.ravel_multi_index((b, h, c), blocks.shape)
        pages = state.table[b, blocks.numpy()[b, h, c]]
        self._copy_records(layer, pages, h, records, places)
        return layout.split(records)[0]

    def stream(
        self, layer: int, pages: np.ndarray, heads: np.ndarray, *, is_repeated: bool = False
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield records of a layer in groups, as `BlockReads.stream` does.

        `is_repeated` says that the next step is expected to read the same records of the layer.
        """
        repeated = layer if is_repeated else None
        return self._reads.stream(self._layers[layer].layout, pages, heads, layer=repeated)

    def find_resident(self, layer: int) -> ResidentLayer | None:
        """Return all records of a layer and its tail for a step, which counts as reading them.

        Returns:
            None where a block was dropped, or a record is not resident.
        """
        state, version = self._layers[layer], self._device.version
        found = self._resident.get(layer)
        if found is None or not found.is_of(state, version):
            H = state.layout.num_heads
            records = state.table[:, None, :] * H + np.arange(H)[:, None]
            addresses = np.zeros(records.shape, dtype=np.int64)
            if records.size and state.table.min() >= 0:
                addresses = self._device.find(state.layout, records.ravel()).reshape(records.shape)
            found = ResidentLayer.make(state, version, records, addresses)
            self._resident[layer] = found
        if found.addresses is None:
            return None
        self._reads.count_hits(state.layout, found.records)
        return found

    def report(self) -> PoolReport:
        """Return bytes per tier and counts so far."""
        moved, unused_bytes = self.ledger.moved, self._reads.unused_bytes
        return PoolReport(
            selector=name_of(self._selector),
            num_layers=len(self._layers),
            num_tokens=max((s.num_tokens for s in self._layers.values()), default=0),
            num_blocks=self._pages.num_live,
            budget_bytes=self._device.budget_bytes,
            device_bytes=self.ledger.resident(Tier.DEVICE),
            peak_device_bytes=self.ledger.peak(Tier.DEVICE),
            tail_bytes=sum(state.tail_bytes for state in self._layers.values()),
            host_bytes=self.ledger.resident(Tier.HOST),
            file_bytes=self.ledger.resident(Tier.FILE),
            num_hits=self._reads.num_hits,
            num_misses=self._reads.num_misses,
            read_bytes=moved(Link.HOST_TO_DEVICE) + moved(Link.FILE_TO_DEVICE) - unused_bytes,
            unused_bytes=unused_bytes,
            written_bytes=moved(Link.DEVICE_TO_HOST) + moved(Link.DEVICE_TO_FILE),
            stall_seconds=self.ledger.stall_seconds,
        )

    def close(self) -> None:
        """Give back all memory and the file. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            self._lower.close()
            self._layers.clear()

    def check_usable(self) -> None:
        """Raise an error if the pool is closed, or lost tokens when a tier failed."""
        self._check_open()
        failure = self._failure or self._lower.failure
        if failure is not None:
            raise PenstockError(
                f"this pool lost tokens when a tier failed ({failure}); reset it, or make a new one"
            ) from failure

    def _tell_selector(self, event: str, layers: list[int] | None, value: object) -> None:
        """Tell the selector of a change of all layers, or of some that it is asked for."""
        told = layers is None or any(self.selector_of(layer) is not None for layer in layers)
        if told and hasattr(self._selector, event):
            getattr(self._selector, event)(value)

    def _check_open(self) -> None:
        if self._closed:
            raise PenstockError("this pool is closed; make a new one")

    def _layer_for(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerBlocks:
        """Return the blocks of a layer, made where they are not there, for keys that fit them."""
        if keys.shape[:3] != values.shape[:3] or keys.dim() != 4 or keys.dtype != values.dtype:
            raise ValueError(
                "keys and values must have shapes (B, H, n, dim) that differ in dim only, and one "
                f"dtype; got {tuple(keys.shape)} {keys.dtype} and {tuple(values.shape)} "
                f"{values.dtype}"
            )
        layout = BlockLayout(
            keys.shape[1],
            self.block_tokens,
            keys.shape[3],
            values.shape[3],
            keys.dtype,
            self._alignment_bytes,
        )
        state = self._layers.get(layer)
        if state is None:
            return self._make_layer(layer, layout, keys.shape[0])
        if state.layout != layout or state.batch_size != keys.shape[0]:
            raise ValueError(
                f"layer {layer} holds {state.batch_size} sequences of {state.layout}; got "
                f"{keys.shape[0]} of {layout}"
            )
        return state

    def _make_layer(self, layer: int, layout: BlockLayout, batch_size: int) -> LayerBlocks:
        if layout.dtype not in _DTYPES:
            raise TypeError(f"keys must be one of {_DTYPES}; got {layout.dtype}")
        least = self._num_layers * layout.page_bytes
        if self._device.budget_bytes < least:
            raise InfeasibleError(
                f"device_memory={format_bytes(self._device.budget_bytes)} is below one block per "
                f"layer, {format_bytes(least)} for {self._num_layers} layers of blocks of "
                f"{self.block_tokens} tokens; raise device_memory or lower block_tokens",
                minimum_device_bytes=least,
                proved=True,
            )
        if self._lower.has_file:
            self._reads.drop_ahead()
            self._device.make_staging(layout)
        tail = torch.zeros((batch_size, layout.num_heads, layout.record_items), dtype=layout.dtype)
        state = LayerBlocks(layout, np.zeros((batch_size, 0), dtype=np.int64), tail)
        self._layers[layer] = state
        self.ledger.add(Tier.DEVICE, state.tail_bytes)
        return state

    def _append(
        self,
        layer: int,
        state: LayerBlocks,
        keys: torch.Tensor,
        values: torch.Tensor,
        keep_from: int,
    ) -> None:
        block_tokens, at = self.block_tokens, 0
        while at < keys.shape[2]:
            num_left = keys.shape[2] - at
            if state.num_tail == 0 and num_left >= block_tokens:  # whole blocks
                end = at + num_left // block_tokens * block_tokens
                self._seal(layer, state, keys[:, :, at:end], values[:, :, at:end], keep_from)
            else:
                end = at + min(num_left, block_tokens - state.num_tail)
                place = slice(state.num_tail, state.num_tail + end - at)
                tail_keys, tail_values = state.layout.split(state.tail)
                tail_keys[:, :, place] = keys[:, :, at:end]
                tail_values[:, :, place] = values[:, :, at:end]
                state.num_tail = place.stop
                if state.num_tail == block_tokens:
                    state.num_tail = 0
                    self._seal(layer, state, tail_keys, tail_values, keep_from)
            at = end

    def _seal(
        self,
        layer: int,
        state: LayerBlocks,
        keys: torch.Tensor,
        values: torch.Tensor,
        keep_from: int,
    ) -> None:
        """Add full blocks to a layer."""
        num_blocks = keys.shape[2] // self.block_tokens
        skipped = min(num_blocks, max(0, keep_from // self.block_tokens - state.num_blocks))
        table = np.full((state.batch_size, num_blocks), -1, dtype=np.int64)
        start = skipped * self.block_tokens
        if skipped < num_blocks:
            table[:, skipped:] = self._writes.store(
                layer, state.layout, keys[:, :, start:], values[:, :, start:]
            )
        first_block = state.num_blocks
        state.table = np.concatenate([state.table, table], axis=1)
        selector = self.selector_of(layer)
        if hasattr(selector, "observe"):
            shape = (num_blocks, self.block_tokens)
            selector.observe(layer, first_block, keys.unflatten(2, shape))
            self._device.set_selector_bytes(int(getattr(selector, "nbytes", 0)))

    def _crop(self, layer: int, state: LayerBlocks, num_tokens: int) -> None:
        num_blocks, num_tail = divmod(num_tokens, self.block_tokens)
        if num_blocks < state.num_blocks:
            if num_tail:
                self._load_tail(layer, state, num_blocks)
            self._release(state.layout, state.table[:, num_blocks:])
            state.table = state.table[:, :num_blocks].copy()
        state.num_tail = num_tail

    def _load_tail(self, layer: int, state: LayerBlocks, block: int) -> None:
        """Copy a full block to the tail, which it becomes again."""
        column = state.table[:, block]
        if (column < 0).any():
            raise ValueError(
                f"layer {layer} keeps a window only, which block {block} has left; call "
                "activate_past_recording() before the tokens that are to be taken back"
            )
        heads = state.layout.num_heads
        pages = column.repeat(heads)
        numbers = np.arange(len(pages))
        self._copy_records(layer, pages, numbers % heads, state.tail, numbers)

    def _copy_records(
        self,
        layer: int,
        pages: np.ndarray,
        heads: np.ndarray,
        to: torch.Tensor,
        places: np.ndarray,
    ) -> None:
        """Copy records to places of `to`, numbers of records in it."""
        num_bytes = self._layers[layer].layout.record_bytes
        for items, addresses in self.stream(layer, pages, heads):
            copy_pieces(to.data_ptr() + places[items] * num_bytes, addresses, num_bytes)

    def _reorder(self, state: LayerBlocks, chosen: np.ndarray) -> None:
        if len(chosen) and not (chosen.min() >= 0 and chosen.max() < state.batch_size):
            raise IndexError(
                f"index must name sequences of [0, {state.batch_size}); got {chosen.tolist()}"
            )
        old, old_bytes = state.table, state.tail_bytes
        state.table = old[chosen]
        np.add.at(self._pages.references, state.table[state.table >= 0], 1)
        self._release(state.layout, old)
        state.tail = state.tail[torch.from_numpy(chosen)]
        self.ledger.add(Tier.DEVICE, state.tail_bytes - old_bytes)

    def _release(self, layout: BlockLayout, table: np.ndarray) -> None:
        """Take away references of blocks; pages without one are freed."""
        pages = table[table >= 0]
        if not len(pages):
            return
        np.subtract.at(self._pages.references, pages, 1)
        dead = np.unique(pages[self._pages.references[pages] == 0])
        if len(dead):
            self._reads.release(dead)
            self._writes.free(layout, dead)
