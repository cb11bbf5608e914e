"""Lowering: from a program to kernels, in one of two ways."""

from penstock.rgnn.lowering._order import find_live_ranges, find_overwritten
from penstock.rgnn.lowering._program import Direction, LoweredProgram, lower, lower_for_arena
from penstock.rgnn.lowering._schedule import (
    Kernel,
    KernelKind,
    KernelSchedule,
    find_fused_outers,
    find_reads,
    is_elementwise,
    is_typed_product,
)

__all__ = [
    "Direction",
    "Kernel",
    "KernelKind",
    "KernelSchedule",
    "LoweredProgram",
    "find_fused_outers",
    "find_live_ranges",
    "find_overwritten",
    "find_reads",
    "is_elementwise",
    "is_typed_product",
    "lower",
    "lower_for_arena",
]
