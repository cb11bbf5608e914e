"""Pool of blocks: keys and values of all layers, over the tiers.

A layer's table says which page is which block of each sequence; sequences share pages, as beams do.
The newest, unfinished block of every sequence (the tail) never leaves the device and is copied.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Collection, Generator, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from penstock.errors import PenstockError, PrefixFileError, StoreReadError
from penstock.kv._blocks import LayerBlocks, check_index, index_repeats
from penstock.kv._inputs import Recompute, check_inputs
from penstock.kv._layout import BlockLayout, KeyShape, check_place
from penstock.kv._owner import Owner, one_at_a_time
from penstock.kv._platform import make_platform
from penstock.kv._prefix import begin_with, save_pool
from penstock.kv._prefix_file import PrefixFile
from penstock.kv._reads import Groups
from penstock.kv._report import PoolReport
from penstock.kv._resident import ResidentLayers
from penstock.kv._selector import claim, name_of, resolve_selector, tell
from penstock.kv._tiers import PoolTiers
from penstock.memory import FileStore, Ledger, Tier
from penstock.memory.pages import DIRECT_IO_BYTES
from penstock.units import parse_bytes, parse_count


class BlockPool(Owner):
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
        host_memory: The most bytes of host memory below; None: all it takes, with a store none.
        store: Directory, or `FileStore`, of the file below; None: no file.
        block_tokens: Tokens of a block, T.
        device: Of the keys: `"cpu"`, where the device tier is the RAM of the budget, or a GPU
            (`"cuda:0"`), where host memory is registered with CUDA.
        num_layers: Layers that will come: a budget below one block of each is refused at once.
        shapes: Their heads and the numbers of a key and of a value, where they are not all alike.
        selector: Blocks that steps of few tokens read, as of `penstock.kv.cache`.
        selected_layers: Layers that the selector is asked for; None: all.
        recompute: Function `(layer, inputs) -> (keys, values)` that computes blocks again, of
            inputs `(k, T, width)` keys `(k, H, T, key_dim)` and values. `append` then takes inputs
            to keep below, and missing blocks are computed where reading the file takes longer.
            None: they are always read.
        prefix: File that `save` wrote, with whose tokens the pool begins; they stay in it until
            they are read. Selectors that keep something of the keys read them once.

    Raises:
        ValueError, TypeError: A size is none, or the device is not here.
        StoreUnavailableError: The directory, or the prefix file, cannot be used.
        PrefixFileError: The prefix file is none, damaged, newer, or of blocks of another length.
        InfeasibleError: The budget is below one block per layer of the prefix file.
        PenstockError: `recompute` on a GPU; CUDA cannot register host memory.
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
        shapes: Mapping[int, KeyShape] | None = None,
        selector: object = "all",
        selected_layers: Collection[int] | None = None,
        recompute: Recompute | None = None,
        prefix: PrefixFile | str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.platform = make_platform(device)
        if recompute is not None and self.platform.has_staging:
            raise PenstockError(f"recompute= is for pools on the CPU; leave it out on {device}")
        self.block_tokens = parse_count(block_tokens, name="block_tokens", least=1)
        self._selector = resolve_selector(selector)
        self._selected_layers = selected_layers
        self.ledger = Ledger()
        self._layers: dict[int, LayerBlocks] = {}
        budget_bytes = parse_bytes(device_memory, name="device_memory")
        if host_memory is None and store is not None:
            host_memory = 0
        host_bytes = None if host_memory is None else parse_bytes(host_memory, name="host_memory")
        if prefix is not None and not isinstance(prefix, PrefixFile):
            prefix = PrefixFile(os.fspath(prefix))
        self._alignment_bytes = 64 if store is None and prefix is None else DIRECT_IO_BYTES
        self._make_tiers = functools.partial(
            PoolTiers,
            self.platform,
            self.ledger,
            budget_bytes=budget_bytes,
            host_bytes=host_bytes,
            store=store,
            num_layers=max(num_layers, 0 if prefix is None else len(prefix.layers)),
            shapes=shapes or {},
            recompute=recompute,
            is_selective=self._selector is not None,
        )
        self._failure: BaseException | None = None
        self._tiers = self._make_tiers(prefix=prefix)
        claim(self._selector, self)
        if prefix is not None:
            with contextlib.ExitStack() as stack, self.platform.use():
                stack.callback(self.close)
                begin_with(self, prefix, self._tiers.pages, self._tiers.lower)
                self._tiers.device.count_selector(self._selector)
                stack.pop_all()

    @one_at_a_time
    def save(self, path: str | os.PathLike[str]) -> None:
        """Save all tokens to a file, whose name appears when it is complete, or replace it.

        Raises:
            StoreError: The file could not be written, or tokens not be read.
        """
        self.check_usable()
        save_pool(self, os.fspath(path), header={}, tensors={})

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
        layers = self._selected_layers
        return self._selector if layers is None or layer in layers else None

    def length(self, layer: int) -> int:
        """Return the number of tokens of a layer's sequences."""
        return self._layers[layer].num_tokens if layer in self._layers else 0

    def num_blocks(self, layer: int) -> int:
        """Return the number of full blocks of a layer's sequences."""
        return self._layers[layer].num_blocks if layer in self._layers else 0

    @one_at_a_time
    def append(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        keep_from: int = 0,
        inputs: torch.Tensor | None = None,
    ) -> None:
        """Add tokens to a layer.

        Args:
            layer: Number of the layer.
            keys: `(B, H, n, key_dim)` in float32, float16 or bfloat16.
            values: `(B, H, n, value_dim)` of the same dtype.
            keep_from: Blocks that end before this token are not kept.
            inputs: `(B, n, width)`, of which `recompute` of the pool makes these keys and values;
                None: these tokens are always read.

        Raises:
            ValueError, TypeError: Shapes or dtypes do not fit those of earlier calls.
            InfeasibleError: The budget is below one block per layer; nothing was stored.
            CapacityError, StoreFullError, StoreError: A tier below refuses; the pool cannot be
                used after that, except for `reset` and `close`.
        """
        self.check_usable()
        keys, values = keys.detach(), values.detach()
        kept = self._tiers.inputs
        if inputs is not None:
            check_inputs(kept, keys, inputs)
        state = self._layer_for(layer, keys, values, inputs)
        num_before = state.num_tokens
        with self._change():
            for full in state.add(keys, values):
                self._seal(layer, state, *full, keep_from)
            if inputs is not None and kept is not None:
                kept.append(layer, state.table, inputs, num_before)

    @one_at_a_time
    def crop(self, num_tokens: int, layers: list[int] | None = None) -> None:
        """Keep the first tokens of every sequence and forget the others.

        Args:
            num_tokens: How many to keep; nothing happens where a layer has no more.
            layers: Layers to crop; None: all.

        Raises:
            ValueError, TypeError: It is no whole number from 0 on, or the tokens before are not
                there: the layer keeps a window only.
        """
        self.check_usable()
        num_tokens = parse_count(num_tokens, name="num_tokens")
        for layer in self.layers() if layers is None else layers:
            state = self._layers.get(layer)
            if state is not None and num_tokens < state.num_tokens:
                state.check_crop(layer, num_tokens)
                with self._change():
                    self._crop(layer, state, num_tokens)
        self._tell_selector("crop", layers, num_tokens // self.block_tokens)

    @one_at_a_time
    def reorder(self, index: torch.Tensor, layers: list[int] | None = None) -> None:
        """Make sequence i a copy of sequence `index[i]`; full blocks are shared, not copied.

        Args:
            index: int64 `(any number,)`: that many sequences there are afterwards.
            layers: Layers to reorder; None: all.

        Raises:
            IndexError: There is no such sequence.
            TypeError, ValueError: The index is none.
            PenstockError: A user's selector cannot follow a change of some layers.
        """
        self.check_usable()
        check_index(index)
        self._choose(index, [i for i in self.layers() if layers is None or i in layers])

    def _choose(self, index: torch.Tensor, layers: list[int]) -> None:
        chosen = index.detach().cpu().numpy().astype(np.int64)
        for layer in layers:
            self._layers[layer].check_reorder(layer, chosen)
        self._tell_selector("reorder", layers, index)
        for layer in layers:
            with self._change():
                self._reorder(self._layers[layer], chosen)
                if self._tiers.inputs is not None:
                    self._tiers.inputs.reorder(layer, chosen)

    @one_at_a_time
    def repeat(self, repeats: int, layers: list[int] | None = None) -> None:
        """Make every sequence `repeats` sequences, one after the other.

        Raises:
            ValueError, TypeError: `repeats` is no whole number above 0.
        """
        self.check_usable()
        sizes = {i: self.batch_size(i) for i in self.layers() if layers is None or i in layers}
        for size, index in index_repeats(sizes.values(), repeats).items():
            self._choose(index, [layer for layer, each in sizes.items() if each == size])

    @one_at_a_time
    def drop_before(self, layer: int, token: int) -> None:
        """Forget the blocks of a layer that end before a token; their numbers stay taken."""
        self.check_usable()
        state, end = self._layers.get(layer), max(0, token // self.block_tokens)
        if state is not None and min(end, state.num_blocks) > state.num_dropped:
            with self._change():
                self._tiers.release(state.layout, state.table[:, :end])
                state.drop(min(end, state.num_blocks))

    @one_at_a_time
    def reset(self, layers: list[int] | None = None) -> None:
        """Forget all tokens.

        Args:
            layers: Layers to reset; None: all. After a failure all are reset.
        """
        self.check_open()
        with self._change():
            if self._failure is not None or self._tiers.lower.failure is not None:
                self._start_anew()
            self._tiers.device.settle()
            self._tell_selector("crop", layers, 0)
            for layer in self.layers() if layers is None else layers:
                if (state := self._layers.pop(layer, None)) is not None:
                    self._tiers.release(state.layout, state.table)
                    self.ledger.add(Tier.DEVICE, -state.tail_bytes)
                    if self._tiers.inputs is not None:
                        self._tiers.inputs.reset(layer)
            if not self._layers:
                self._tiers.device.count_selector(self._selector)
                self._tiers.device.restart()

    def _start_anew(self) -> None:
        """Make the tiers anew: what a failure or an interrupt left in them is in doubt."""
        reads = self._tiers.reads
        reads.drop_ahead()
        self._tiers.close()
        self._layers.clear()
        self._tiers = self._make_tiers(prefix=None)
        self._tiers.reads.keep_counts_of(reads)
        self._tell_selector("crop", None, 0)
        self._failure = None

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Refuse all use after a change that ended in its middle, by an error or an interrupt."""
        try:
            with self.platform.use():
                yield
        except BaseException as error:
            self.fail(error)
            raise

    @one_at_a_time
    def keys_of(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return the keys of full blocks, wherever they are.

        Args:
            layer: Number of the layer.
            blocks: int64 `(B, H, k)` as `select` returns them.

        Returns:
            `(B, H, k, block_tokens, key_dim)`; zeros where `blocks` is -1, or was dropped.

        Raises:
            ValueError: They are no blocks of the layer.
        """
        self.check_usable()
        if layer not in self._layers:
            raise ValueError(f"layer must be one of {self.layers()}; got {layer!r}")
        state, layout = self._layers[layer], self._layers[layer].layout
        numbers = state.find_kept(blocks.dtype, self.platform.to_host(blocks))
        c, b, h = np.nonzero(numbers.transpose(2, 0, 1) >= 0)  # as they lie in the file
        pages = state.table[b, numbers[b, h, c]]
        with self.platform.use():
            shape = (*blocks.shape, layout.record_items)
            records = torch.zeros(shape, dtype=layout.dtype, device=self.platform.device)
            places = np.ravel_multi_index((b, h, c), numbers.shape)
            self._copy_records(layer, pages, h, records, places)
        return self.platform.hand_over(layout.split(records)[0])

    def _copy_records(
        self,
        layer: int,
        pages: np.ndarray,
        heads: np.ndarray,
        to: torch.Tensor,
        places: np.ndarray,
    ) -> None:
        """Copy records to places of `to`, numbers of records in it."""
        num_bytes = self.layout(layer).record_bytes
        for items, addresses in self.stream(layer, pages, heads):
            self.platform.copy(to.data_ptr() + places[items] * num_bytes, addresses, num_bytes)

    def stream(
        self, layer: int, pages: np.ndarray, heads: np.ndarray, *, is_repeated: bool = False
    ) -> Generator[tuple[np.ndarray, np.ndarray], None, None]:
        """Yield records of a layer in groups, as `BlockReads.stream` does.

        `is_repeated` says that the next step is expected to read the same records of the layer.
        """
        repeated, layout = layer if is_repeated else None, self._layers[layer].layout
        try:
            yield from self._tiers.reads.stream(layout, pages, heads, layer=repeated)
        except (GeneratorExit, StoreReadError, PrefixFileError):
            raise  # nothing that was not read has been given a slot
        except BaseException as error:
            self.fail(error)
            raise

    def is_shared(self, pages: np.ndarray) -> bool:
        """Return whether several sequences have one of some pages, int64."""
        return bool((self._tiers.pages.references[pages] > 1).any())

    def make_chunks(self, num_bytes: int) -> None:
        """Have blocks of so many bytes pass at once, as `DeviceTier.make_chunks` does."""
        self._tiers.device.make_chunks(num_bytes)

    @property
    def resident(self) -> ResidentLayers:
        """Layers whose records are all on the device."""
        return self._tiers.resident

    def bring_to_host(self, addresses: np.ndarray, num_bytes: int) -> Groups:
        """Yield pieces at addresses that the CPU can read, as `PageTiers.bring_to_host` does."""
        return self._tiers.lower.bring_to_host(addresses, num_bytes)

    def report(self) -> PoolReport:
        """Return bytes per tier and counts so far."""
        return self._tiers.report(
            selector=name_of(self._selector), layers=list(self._layers.values())
        )

    @one_at_a_time
    def close(self) -> None:
        """Give back all memory and the file. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            if not self.is_forked:
                self._tiers.close()
            self._layers.clear()

    def fail(self, error: BaseException) -> None:
        """Refuse all use until `reset`, because of an error."""
        self._failure = error

    def check_usable(self) -> None:
        """Raise an error if the pool is closed, of another process, or lost tokens."""
        self.check_open()
        failure = self._failure or self._tiers.lower.failure
        if failure is not None:
            raise PenstockError(
                f"this pool lost tokens when a tier failed, or a call was interrupted "
                f"({failure!r}); reset it, or make a new one"
            ) from failure

    def _tell_selector(self, event: str, layers: list[int] | None, value: object) -> None:
        asked = [layer for layer in self._layers if self.selector_of(layer) is not None]
        with self.platform.use():
            tell(self._selector, event, value, asked, layers)

    def _layer_for(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, inputs: torch.Tensor | None
    ) -> LayerBlocks:
        """Return the blocks of a layer, made where they are not there, for keys that fit them."""
        state = self._layers.get(layer)
        if state is not None and state.fits(keys, values):
            return state
        layout = BlockLayout.of(keys, values, self.block_tokens, self._alignment_bytes)
        check_place(self.platform.device, layer, keys, values)
        if state is None:
            return self.make_layer(layer, layout, keys.shape[0], inputs)
        state.check_append(layer, layout, keys, values)
        return state

    def make_layer(
        self, layer: int, layout: BlockLayout, batch_size: int, inputs: torch.Tensor | None
    ) -> LayerBlocks:
        """Return new blocks of a layer, without tokens."""
        shape = (batch_size, layout.num_heads, layout.record_items)
        with self.platform.use():
            self._tiers.add_layer(layer, layout, inputs)
            tail = torch.zeros(shape, dtype=layout.dtype, device=self.platform.device)
        state = LayerBlocks(layout, np.zeros((batch_size, 0), dtype=np.int64), tail)
        self._layers[layer] = state
        self.ledger.add(Tier.DEVICE, state.tail_bytes)
        return state

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
            table[:, skipped:] = self._tiers.writes.store(
                layer, state.layout, keys[:, :, start:], values[:, :, start:]
            )
        first_block = state.num_blocks
        state.table = np.concatenate([state.table, table], axis=1)
        selector = self.selector_of(layer)
        if hasattr(selector, "observe"):
            shape = (num_blocks, self.block_tokens)
            selector.observe(layer, first_block, keys.unflatten(2, shape))
            self._tiers.device.count_selector(self._selector)

    def _crop(self, layer: int, state: LayerBlocks, num_tokens: int) -> None:
        num_blocks, num_tail = divmod(num_tokens, self.block_tokens)
        if self._tiers.inputs is not None:
            self._tiers.inputs.crop(layer, num_tokens, state.num_tokens)
        if num_blocks < state.num_blocks:
            if num_tail:  # a full block becomes the tail again
                pages = state.table[:, num_blocks].repeat(state.layout.num_heads)
                places = np.arange(len(pages))
                heads = places % state.layout.num_heads
                self._copy_records(layer, pages, heads, state.tail, places)
            self._tiers.release(state.layout, state.table[:, num_blocks:])
        state.cut(num_blocks, num_tail)

    def _reorder(self, state: LayerBlocks, chosen: np.ndarray) -> None:
        old, old_bytes = state.table, state.tail_bytes
        state.table = old[chosen]
        self._tiers.share(state.table)
        self._tiers.release(state.layout, old)
        state.tail = state.tail[self.platform.from_host(chosen)]
        self.ledger.add(Tier.DEVICE, state.tail_bytes - old_bytes)
