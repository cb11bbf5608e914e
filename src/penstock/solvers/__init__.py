"""Solvers that Penstock does not write itself, each behind one wrapper."""

from penstock.solvers._linear_program import LinearProgram as LinearProgram
from penstock.solvers._linear_program import can_solve as can_solve

__all__ = ["LinearProgram", "can_solve"]
