"""Programs in Triton kernels, for NVIDIA and AMD GPUs.

Files, in the order in which to read them: `_backend.py` goes through the kernels of a schedule;
`_launch.py` launches its matrix products, which `_kernels.py` has, and its traversals. Those are
written by `_source.py`; `_body.py` and `_operators.py` have the statements in their loops,
`_index.py` the features that a statement reads. `_tables.py` keeps what is precomputed per graph.

Importing this package imports Triton.
"""

from penstock.rgnn.backends.triton._backend import TritonBackend

__all__ = ["TritonBackend"]
