"""Input and output of the packer: buffers with lifetimes, offsets with a height."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

from penstock.tables import Report
from penstock.units import parse_count

_LEAST = -(1 << 63)  # of times, which may be negative


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Consecutive bytes that are needed for a while.

    Example:
        >>> Buffer(0, 10, 4096, alignment=512, gaps=((3, 7),)).spans
        ((0, 3), (7, 10))
    """

    lower: int
    """Time from which its bytes are needed."""
    upper: int
    """Time from which they are not needed any more: lifetimes are half-open, `[lower, upper)`."""
    size: int
    """Bytes, or whatever unit the capacity has; may be zero."""
    alignment: int = 1
    """Its offset is a multiple of this."""
    offset: int | None = None
    """Its fixed offset, or None where the packer decides."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Half-open intervals within the lifetime in which its bytes are free for others; it comes back
    to the same offset."""

    def __post_init__(self) -> None:
        for name in ("lower", "upper", "size", "alignment", "offset"):
            value = getattr(self, name)
            if type(value) is not int and value is not None:  # most are ints
                object.__setattr__(self, name, parse_count(value, name=name, least=_LEAST))
        if not self.lower < self.upper:
            raise ValueError(
                f"lower={self.lower}, upper={self.upper}: a lifetime is half-open, [lower, upper), "
                "and must not be empty"
            )
        if self.size < 0:
            raise ValueError(f"size={self.size}: must be zero or more")
        if self.alignment < 1:
            raise ValueError(f"alignment={self.alignment}: must be one or more")
        if self.offset is not None and (self.offset < 0 or self.offset % self.alignment):
            raise ValueError(
                f"offset={self.offset}: must be zero or more and a multiple of "
                f"alignment={self.alignment}"
            )
        if any(not start < end for start, end in self.gaps):
            raise ValueError(f"gaps={self.gaps}: each must be half-open, (start, end), not empty")
        if self.gaps and not self.spans:
            raise ValueError(f"gaps={self.gaps} leave nothing of [{self.lower}, {self.upper})")

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Half-open intervals in which its bytes are needed, in their order."""
        if not self.gaps:
            return ((self.lower, self.upper),)
        spans, start = [], self.lower
        for gap_start, gap_end in sorted(self.gaps):
            if start < min(gap_start, self.upper):
                spans.append((start, min(gap_start, self.upper)))
            start = max(start, gap_end)
        if start < self.upper:
            spans.append((start, self.upper))
        return tuple(spans)


BufferLike: TypeAlias = Buffer | Sequence[int]
"""A `Buffer`, or `(lower, upper, size)`."""


def as_buffers(buffers: Sequence[BufferLike]) -> list[Buffer]:
    """Return `buffers` as `Buffer`s.

    Raises:
        TypeError: One is neither a `Buffer` nor three whole numbers.
        ValueError: One cannot be; the message begins with its index.
    """
    result = []
    for index, buffer in enumerate(buffers):
        if isinstance(buffer, Buffer):
            result.append(buffer)
            continue
        try:
            lower, upper, size = buffer
        except (TypeError, ValueError):
            raise TypeError(
                f"buffers[{index}]={buffer!r}: must be a Buffer or (lower, upper, size)"
            ) from None
        try:
            result.append(Buffer(lower, upper, size))
        except (TypeError, ValueError) as error:
            raise type(error)(f"buffers[{index}]: {error}") from None
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing(Report, title="packing", hidden={"offsets"}):
    """Offsets of buffers, and how good they are; printing it shows a table without the offsets.

    Example:
        >>> pack([(0, 2, 4), (1, 3, 4)]).offsets
        (0, 4)
    """

    offsets: tuple[int, ...]
    """One for each buffer, in the order in which they were given."""
    height: int
    """Bytes of the packing: the largest offset plus size."""
    lower_bound: int
    """Bytes that no packing of these buffers is below."""
    optimal: bool
    """True if `height` equals `lower_bound`."""
    method: str
    """Its method: "best fit" along a fixed list of orders, or "search" for better orders and by
    branch and bound."""
    engine: str
    """The engine that ran: "c++", or "python" without a compiler, which does not search."""
    num_buffers: int
    num_parts: int
    """Groups of buffers that are never alive together, each packed by itself; 1 in Python."""
    num_nodes: int
    """Placements that the search tried."""
    pack_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary that JSON can hold."""
        return {**super().to_dict(), "offsets": list(self.offsets)}
