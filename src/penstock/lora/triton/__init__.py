"""Linear layers with many adapters in Triton kernels, for NVIDIA and AMD GPUs.

Files, in the order in which to read them: `_call.py` takes the operator's operands; `_launch.py`
launches `_kernels.py`; `_tables.py` says which rows a program has, and `_tiles.py` how many.

Importing this package imports Triton.
"""

from penstock.lora.triton._call import run_backward, run_forward
from penstock.lora.triton._launch import LayerAdapters, backward, forward
from penstock.lora.triton._tables import Part, RowTables, cut_rows, find_parts
from penstock.lora.triton._tiles import choose_tiles

__all__ = [
    "LayerAdapters",
    "Part",
    "RowTables",
    "backward",
    "choose_tiles",
    "cut_rows",
    "find_parts",
    "forward",
    "run_backward",
    "run_forward",
]
