"""Places of records in the file, and the runs of them that are one read each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class FileRecords:
    """Places of records in the file.

    Attributes:
        num_bytes: Bytes of each.
        segments: Segment of each, int32.
        begins: First byte there, int64.
        follows: Whether it begins where the one before it ends, bool.
    """

    num_bytes: int
    segments: np.ndarray
    begins: np.ndarray
    follows: np.ndarray

    def __getitem__(self, some: slice) -> FileRecords:
        parts = self.segments[some], self.begins[some], self.follows[some]
        return FileRecords(self.num_bytes, *parts)

    def find_runs(self, places: np.ndarray | None, most: int) -> np.ndarray:
        """Return the numbers of records that begin a run: one after the other in file and buffer.

        Args:
            places: First byte of each in the buffer, int64; None for one after the other.
            most: Records of a run.
        """
        is_start = ~self.follows
        if places is not None:
            is_start[1:] |= places[1:] - places[:-1] != self.num_bytes
        is_start[::most] = True
        return is_start.nonzero()[0]


@dataclass(frozen=True, eq=False)
class QueuedGroups:
    """Reads of records that pass buffers group by group, started without threads.

    Attributes:
        requests: Offset in the file, first byte in the buffer and bytes of each, int64 `(n, 3)`.
        bounds: Number of the first request of each group, and n.
    """

    requests: np.ndarray
    bounds: list[int]

    def for_buffer(self, group: int, address: int) -> np.ndarray:
        """Return the requests of a group, into a buffer at an address."""
        requests = self.requests[self.bounds[group] : self.bounds[group + 1]].copy()
        requests[:, 1] += address
        return requests
