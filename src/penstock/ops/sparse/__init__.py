"""Products of sparse matrices, with gradients in the operands' patterns and in bounded memory."""

from penstock.ops.sparse._spgemm import ProductPattern, product_pattern, spgemm

__all__ = ["ProductPattern", "product_pattern", "spgemm"]
