"""Operators that never build the big intermediate, exact, deterministic and in bounded memory.

Each is one function on the CPU and on GPUs, forward and backward, with the same bits for any number
of threads. `docs/ops.md` shows them.
"""

from typing import TYPE_CHECKING

from penstock._lazy import load_lazily

if TYPE_CHECKING:
    from penstock.ops._columns import column_reduce
    from penstock.ops.deform import deform_conv2d
    from penstock.ops.rational import GroupRational, group_rational
    from penstock.ops.sparse import ProductPattern, product_pattern, spgemm
    from penstock.ops.windows import LocalConv2d, dynamic_filter2d, local_conv2d, unfold_windows

__all__ = [
    "GroupRational",
    "LocalConv2d",
    "ProductPattern",
    "column_reduce",
    "deform_conv2d",
    "dynamic_filter2d",
    "group_rational",
    "local_conv2d",
    "product_pattern",
    "spgemm",
    "unfold_windows",
]

__getattr__, __dir__ = load_lazily(__name__)
