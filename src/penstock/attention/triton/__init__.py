"""Block-sparse attention in Triton kernels, for NVIDIA and AMD GPUs.

Files, in the order in which to read them: `_launch.py` cuts a call into tiles and launches
`_kernels.py`; `_bytes.py` says how much memory a call asks for.

Importing this package imports Triton.
"""

from penstock.attention.triton._launch import backward, forward

__all__ = ["backward", "forward"]
