"""Memory: tiers and links, one ledger of bytes, staging, the extent file, the measured machine.

`probe` and `CachingAllocator` load on first use, so importing this package stays light.
"""

from typing import TYPE_CHECKING

from penstock._lazy import load_lazily
from penstock.memory._extent_file import Extent, ExtentFile, StartedReads, StoredSpan
from penstock.memory._extents import ExtentAllocator
from penstock.memory._ledger import Ledger, Link, Span, Tier, Timeline
from penstock.memory._ram import available_ram, installed_ram
from penstock.memory._signals import deferred_signals, interruptible, uninterrupted
from penstock.memory._staging import StagingBuffer, StagingPool
from penstock.memory._store import RAM_FILESYSTEMS, FileStore, filesystem_type
from penstock.memory._threads import WorkerThreads
from penstock.memory._transfers import Throttle
from penstock.memory._uncopied import Uncopied
from penstock.memory._whole_file import NewFile, WholeFile

if TYPE_CHECKING:
    from penstock.memory._cpu_allocator import CachingAllocator
    from penstock.memory._probe import find_machine, probe
    from penstock.memory._profile import (
        CacheProfile,
        ComputeProfile,
        LinkProfile,
        MachineProfile,
        TierProfile,
        machine,
    )

__all__ = [
    "RAM_FILESYSTEMS",
    "CacheProfile",
    "CachingAllocator",
    "ComputeProfile",
    "Extent",
    "ExtentAllocator",
    "ExtentFile",
    "FileStore",
    "Ledger",
    "Link",
    "LinkProfile",
    "MachineProfile",
    "NewFile",
    "Span",
    "StagingBuffer",
    "StagingPool",
    "StartedReads",
    "StoredSpan",
    "Throttle",
    "Tier",
    "TierProfile",
    "Timeline",
    "Uncopied",
    "WholeFile",
    "WorkerThreads",
    "available_ram",
    "deferred_signals",
    "filesystem_type",
    "find_machine",
    "installed_ram",
    "interruptible",
    "machine",
    "probe",
    "uninterrupted",
]

__getattr__, __dir__ = load_lazily(__name__)
