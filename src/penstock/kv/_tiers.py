"""Tiers of one pool: places of pages, and what stores, reads, computes and frees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from penstock.kv._blocks import BlockWrites, LayerBlocks
from penstock.kv._device import DeviceTier
from penstock.kv._inputs import InputPages, Recompute
from penstock.kv._layout import BlockLayout, KeyShape
from penstock.kv._lower import PageTiers
from penstock.kv._pages import PageTable
from penstock.kv._platform import Platform
from penstock.kv._prefix_file import PrefixFile
from penstock.kv._reads import BlockReads
from penstock.kv._report import PoolReport
from penstock.kv._resident import ResidentLayers
from penstock.memory import FileStore, Ledger, Link, Tier


class PoolTiers:
    """Tiers of one pool, with nothing in them.

    Args:
        platform: The device.
        ledger: Account of bytes.
        budget_bytes: The most bytes of the device tier.
        host_bytes: The most bytes of host memory; None: no limit.
        store: Directory of the file; None: no file.
        num_layers: Layers that will come, at least.
        shapes: Heads, numbers of a key and of a value of layers that will come, where known.
        recompute: Function that computes keys and values of inputs; None: inputs are not kept.
        prefix: File with pages that are there already; None: there is none.
        is_selective: Whether a selector chooses the blocks of a step.

    Attributes:
        pages: Places of pages.
        lower: Host memory and files.
        device: Slots of records and staging memory.
        writes: Storing of full blocks.
        inputs: Kept inputs; None where they are not.
        reads: Reading of records.
        resident: Layers whose records are all on the device.
    """

    def __init__(
        self,
        platform: Platform,
        ledger: Ledger,
        *,
        budget_bytes: int,
        host_bytes: int | None,
        store: FileStore | str | None,
        num_layers: int,
        shapes: Mapping[int, KeyShape],
        recompute: Recompute | None,
        prefix: PrefixFile | None,
        is_selective: bool,
    ) -> None:
        self._ledger, self._num_layers = ledger, num_layers
        self._shapes = dict(shapes)
        self.pages = PageTable()
        self.lower = PageTiers(
            platform,
            self.pages,
            ledger,
            host_bytes,
            store,
            prefix,
            times_reads=recompute is not None,
        )
        self.device = DeviceTier(
            platform, budget_bytes, self.pages, self.lower, ledger, is_selective=is_selective
        )
        parts = self.pages, self.device, self.lower
        self.writes = BlockWrites(*parts)
        self.inputs = None if recompute is None else InputPages(*parts, ledger, recompute)
        self.reads = BlockReads(*parts, ledger, self.inputs)
        self.resident = ResidentLayers(self.pages, self.device, self.reads)

    def add_layer(self, layer: int, layout: BlockLayout, inputs: torch.Tensor | None) -> None:
        """Make room for a layer to pass the buffers, with inputs such as `(B, n, width)` or none.

        Raises:
            InfeasibleError: The budget is below one block per layer.
        """
        self._shapes[layer] = layout.num_heads, layout.key_dim, layout.value_dim
        pages = [layout.with_shape(shape).page_bytes for shape in self._shapes.values()]
        pages = sorted(pages)[-self._num_layers :]  # of more layers than were told, the largest
        num_unknown = max(0, self._num_layers - len(pages))  # taken to be as this one
        self.device.check_budget(sum(pages) + num_unknown * layout.page_bytes, layout.block_tokens)
        page_bytes = layout.page_bytes
        if self.inputs is not None and inputs is not None:
            self.inputs.add_layer(layer, layout, inputs)
            page_bytes += self.inputs.layout(layer).page_bytes
        if self.lower.has_file:
            self.reads.drop_ahead()
        self.device.make_staging(page_bytes, has_file=self.lower.has_file)

    def share(self, table: np.ndarray) -> None:
        """Add a reference to each page of a table."""
        np.add.at(self.pages.references, table[table >= 0], 1)

    def release(self, layout: BlockLayout, table: np.ndarray) -> None:
        """Take away a reference of each page of a table; pages without one are freed."""
        pages = table[table >= 0]
        if not len(pages):
            return
        np.subtract.at(self.pages.references, pages, 1)
        dead = np.unique(pages[self.pages.references[pages] == 0])
        if len(dead):
            self.reads.release(dead)
            if self.inputs is not None:
                self.inputs.free(dead)
            self.writes.free(layout, dead)

    def report(self, *, selector: str, layers: Sequence[LayerBlocks]) -> PoolReport:
        """Return bytes per tier and counts so far, of a pool with these layers."""
        ledger, reads, inputs = self._ledger, self.reads, self.inputs
        written_bytes = ledger.moved(Link.DEVICE_TO_HOST) + ledger.moved(Link.DEVICE_TO_FILE)
        read_bytes = ledger.moved(Link.HOST_TO_DEVICE) + ledger.moved(Link.FILE_TO_DEVICE)
        if not self.device.platform.has_staging:  # else they came to host memory only
            read_bytes -= reads.unused_bytes
        return PoolReport(
            selector=selector,
            num_layers=len(layers),
            num_tokens=max((state.num_tokens for state in layers), default=0),
            num_blocks=self.pages.num_live,
            budget_bytes=self.device.budget_bytes,
            device_bytes=ledger.resident(Tier.DEVICE),
            peak_device_bytes=ledger.peak(Tier.DEVICE),
            tail_bytes=sum(state.tail_bytes for state in layers)
            + (0 if inputs is None else inputs.tail_bytes),
            host_bytes=ledger.resident(Tier.HOST),
            file_bytes=ledger.resident(Tier.FILE),
            prefix_bytes=self.lower.prefix_bytes,
            num_hits=reads.num_hits,
            num_misses=reads.num_misses,
            num_computed=0 if inputs is None else inputs.num_computed,
            read_bytes=read_bytes,
            unused_bytes=reads.unused_bytes,
            written_bytes=written_bytes,
            stall_seconds=ledger.stall_seconds,
        )

    def close(self) -> None:
        """Wait for transfers, close files, and give back memory."""
        self.reads.drop_ahead()
        self.lower.close()
        self.device.close()
        if self.inputs is not None:
            self.inputs.close()
        self.pages.references[:] = 0
        for tier in Tier:
            self._ledger.add(tier, -self._ledger.resident(tier))
