"""Table of pages: what refers to each, and where it is below the device."""

from __future__ import annotations

import numpy as np


class PageTable:
    """Every page's references and places, by its number.

    Attributes:
        references: Blocks of sequences that are this page; int32.
        host: Address in host memory, 0 where it is not there; int64.
        host_slot: Slot there; int64.
        segment: Segment of the file, -1 where it is not there; int32.
        place: Place in the segment; int32.
        layer: Layer that it belongs to; int32.
        inputs: Page of the inputs from which it can be computed again, -1 for none; int64.
    """

    def __init__(self) -> None:
        self.references = np.zeros(0, dtype=np.int32)
        self.host = np.zeros(0, dtype=np.int64)
        self.host_slot = np.zeros(0, dtype=np.int64)
        self.segment = np.zeros(0, dtype=np.int32)
        self.place = np.zeros(0, dtype=np.int32)
        self.layer = np.zeros(0, dtype=np.int32)
        self.inputs = np.zeros(0, dtype=np.int64)
        self._free: list[int] = []

    @property
    def num_live(self) -> int:
        """Pages that are referenced."""
        return int(np.count_nonzero(self.references))

    def take(self, num_pages: int, layer: int) -> np.ndarray:
        """Return numbers of new pages of a layer, each with one reference and no place."""
        missing = num_pages - len(self._free)
        if missing > 0:
            old = len(self.references)
            more = max(missing, old, 256)
            for name in ("references", "host", "host_slot", "segment", "place", "layer", "inputs"):
                values = getattr(self, name)
                setattr(self, name, np.concatenate([values, np.zeros(more, values.dtype)]))
            self._free.extend(range(old + more - 1, old - 1, -1))
        pages = np.array([self._free.pop() for _ in range(num_pages)], dtype=np.int64)
        self.references[pages] = 1
        self.host[pages] = 0
        self.segment[pages] = self.inputs[pages] = -1
        self.layer[pages] = layer
        return pages

    def give_back(self, page: int) -> None:
        """Let a page's number be taken again."""
        self._free.append(page)

    def is_below(self, page: int) -> bool:
        """Return whether a page was written to a lower tier."""
        return bool(self.host[page] != 0 or self.segment[page] >= 0)
