"""Attention over records by address in Triton kernels, for NVIDIA and AMD GPUs.

Files, in the order in which to read them: `_operator.py` checks a call; `_launch.py` cuts it into
tasks and launches `_kernels.py`; `_copy.py` launches copies of records.

Importing this package imports Triton.
"""

from penstock.kv.triton._copy import common_alignment, copy_launch
from penstock.kv.triton._launch import most_rows
from penstock.kv.triton._operator import ALIGNMENT_BYTES, attend_records

__all__ = ["ALIGNMENT_BYTES", "attend_records", "common_alignment", "copy_launch", "most_rows"]
