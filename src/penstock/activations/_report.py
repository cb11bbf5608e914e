"""Report of what offloading did, in numbers."""

from __future__ import annotations

import dataclasses

from penstock.tables import Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadReport(Report, title="penstock.offload"):
    """Account of an `Offload`, from its creation until `report()` was called.

    Sums run over all steps; a step is what is saved up to a backward pass, and that pass (a
    micro-batch of gradient accumulation is a step).
    """

    num_steps: int
    """Steps begun."""
    num_saved: int
    """Storages that autograd saved, each once, without parameters, buffers and views of them."""
    num_kept: int
    """Those of them whose write was never started."""
    saved_bytes: int
    """Bytes of the `num_saved` storages."""
    offloaded_bytes: int
    """Bytes whose write was started, whether or not they were forwarded before it had ended."""
    bytes_written: int
    """Bytes whose write was completed."""
    forwarded_bytes: int
    """Offloaded bytes that were forwarded from memory, without a read."""
    bytes_read: int
    """Bytes read back; more than once where a graph is used more than once."""
    peak_device_bytes: int
    """Most saved bytes resident on the device tier at once, bytes in flight included."""
    peak_host_bytes: int
    """Most bytes of host memory that Penstock held at once."""
    peak_file_bytes: int
    """Most bytes in the file at once."""
    stall_seconds: float
    """Time for which the computation waited for a transfer."""
    policy: str
    """"all" or "auto"."""
    reason: str
    """Why the policy chose what it chose; or why offloading stopped."""
    device: str
    """Device type of the tensors that were offloaded: "cpu", "cuda", or "none"."""
    store: str | None
    """Directory of the file tier."""
    direct_io: bool | None
    """True if the file is read and written past the page cache; None without a file."""
    allocator: str
    """CPU allocator that served the tensors: "caching", or "stock" and why."""
    hooks: str
    """Language of the hooks for parameters and small tensors: "C++", or "Python", which is slower,
    where it cannot be built."""
    moved_bytes: dict[str, int]
    """Bytes moved per link."""
