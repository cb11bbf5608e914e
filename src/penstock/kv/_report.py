"""Report of a pool: bytes per tier, hits and misses."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.tables import Report


@dataclass(frozen=True, kw_only=True)
class PoolReport(Report, title="penstock.kv"):
    """Bytes and counts of a `BlockPool`; printing it shows a table."""

    selector: str
    """Name of the selector."""
    num_layers: int
    """Layers that hold keys and values."""
    num_tokens: int
    """Tokens of a sequence, of the longest layer."""
    num_blocks: int
    """Full blocks of all layers and sequences; one that sequences share counts once."""
    budget_bytes: int
    """The device tier's budget."""
    device_bytes: int
    """Bytes on the device now: slots, staging, selector, unfinished blocks."""
    peak_device_bytes: int
    """The most of these so far."""
    tail_bytes: int
    """Bytes of the unfinished blocks, which are beyond the budget."""
    host_bytes: int
    """Bytes in host memory below."""
    file_bytes: int
    """Bytes in the file below."""
    prefix_bytes: int
    """Bytes of blocks in use that are in the prefix file that the pool began with."""
    num_hits: int
    """Records that were read and were resident."""
    num_misses: int
    """Records that were read and were not."""
    num_computed: int
    """Blocks of the misses that were computed from inputs instead of being read."""
    read_bytes: int
    """Bytes of the misses and of inputs, read from the tiers below."""
    unused_bytes: int
    """Bytes that were read ahead of a layer, and then not used: they are beyond `read_bytes`."""
    written_bytes: int
    """Bytes written to the tiers below; each block at most once."""
    stall_seconds: float
    """Time that the computation waited for reads."""
