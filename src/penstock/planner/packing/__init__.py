"""Offset assignment for buffers with known lifetimes."""

from penstock.planner.packing._check import check_overlap, check_packing
from penstock.planner.packing._pack import pack
from penstock.planner.packing._types import Buffer, Packing

__all__ = ["Buffer", "Packing", "check_overlap", "check_packing", "pack"]
