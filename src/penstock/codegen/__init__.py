"""Source text becomes a loaded library: the system's compiler builds it, ctypes loads it.

Penstock ships no compiled code, so no wheel has to match a release of PyTorch. What needs C++ is
built at its first use, in under a second, and found in the user's cache from then on.
"""

from pathlib import Path

from penstock.codegen._build import build_library, why_nothing_can_be_built
from penstock.codegen._cache import CacheEntry, cache_entry
from penstock.codegen._compiler import find_compiler
from penstock.codegen._count import ByteCount, count_bytes
from penstock.codegen._kernels import (
    COMPILER_OPTIONS,
    KernelName,
    Run,
    TritonLaunch,
    ceil_div,
    ceil_power,
    launch,
    name_kernels,
    product_precision,
    use_device,
)
from penstock.codegen._load import load_library, load_module, load_optional_library
from penstock.codegen._structs import struct_type, to_struct

__all__ = [
    "COMPILER_OPTIONS",
    "IO_RING",
    "REALS",
    "THREADS",
    "VECTORS",
    "ByteCount",
    "CacheEntry",
    "KernelName",
    "Run",
    "TritonLaunch",
    "build_library",
    "cache_entry",
    "ceil_div",
    "ceil_power",
    "count_bytes",
    "find_compiler",
    "launch",
    "load_library",
    "load_module",
    "load_optional_library",
    "name_kernels",
    "product_precision",
    "struct_type",
    "to_struct",
    "use_device",
    "why_nothing_can_be_built",
]

IO_RING = Path(__file__).with_name("io_ring.cpp")
"""C++ source of `Ring`, the kernel's queue of reads; it comes before what uses it."""
REALS = Path(__file__).with_name("reals.cpp")
"""C++ source of vectors of float or double, and of rows of any dtype as these; after `VECTORS`."""
THREADS = Path(__file__).with_name("threads.cpp")
"""C++ source of `parallel`, which works with torch's threads: the first one of a library's."""
VECTORS = Path(__file__).with_name("vectors.cpp")
"""C++ source of vectors of floats and functions of them; it comes before what uses it."""
