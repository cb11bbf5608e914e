"""Passes: from a program to another that computes the same, at less cost, with its gradients.

Each is a function from a program and a graph's counts to another program; it says what it did and
what it left, with the reason.
"""

from penstock.rgnn.passes._compact import choose_rows, lay_out
from penstock.rgnn.passes._decision import Decision
from penstock.rgnn.passes._differentiate import differentiate, name_seed
from penstock.rgnn.passes._pipeline import REWRITES, OptimizedProgram, optimize

__all__ = [
    "REWRITES",
    "Decision",
    "OptimizedProgram",
    "choose_rows",
    "differentiate",
    "lay_out",
    "name_seed",
    "optimize",
]
