"""Laid-out programs in Triton kernels, for NVIDIA and AMD GPUs.

Files, in the order in which to read them: `_launch.py` turns kernels of a schedule into launches;
`_kernels.py` has the matrix products; `_source.py` writes traversals, with `_body.py` and
`_operators.py` for their statements and `_index.py` for the features that a statement reads;
`_tables.py` keeps what is precomputed per graph.

Importing this package imports Triton.
"""

from penstock.rgnn._backends._triton._execute import Execution, execute

__all__ = ["Execution", "execute"]
