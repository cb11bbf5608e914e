"""Laid-out programs in Triton kernels, for NVIDIA and AMD GPUs.

Files, in the order in which to read them: `_execute.py` goes through the kernels of a schedule;
`_products.py` launches its matrix products, which `_kernels.py` has, and `_traverse.py` its
traversals. Those are written by `_source.py`: `_traversals.py` has their loops, `_body.py` and
`_operators.py` the statements in them, `_index.py` the features that a statement reads.
`_tables.py` keeps what is precomputed per graph.

Importing this package imports Triton.
"""

from penstock.rgnn._backends._triton._execute import execute, execute_with

__all__ = ["execute", "execute_with"]
