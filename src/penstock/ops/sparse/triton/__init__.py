"""Products of sparse matrices in a Triton kernel, for NVIDIA and AMD GPUs.

The pattern is found by torch; `_launch.py` launches the kernel of `_kernels.py` for the values and
both gradients. Importing this imports Triton.
"""

from penstock.ops.sparse.triton._launch import differentiate, multiply

__all__ = ["differentiate", "multiply"]
