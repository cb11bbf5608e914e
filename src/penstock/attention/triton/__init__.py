"""Block-sparse attention in Triton kernels, for NVIDIA and AMD GPUs.

`_launch.py` cuts a call into tiles and launches `_kernels.py`.

Importing this package imports Triton.
"""

from penstock.attention.triton._launch import backward, forward

__all__ = ["backward", "forward"]
