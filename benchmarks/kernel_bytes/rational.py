"""Bytes that the kernels of rational activations ask of memory, as formulas of shapes.

With E bytes of an element, S of a sum, and K coefficients of a group:

    evaluate        x and y once, 2 N C E; of each block, K S of coefficients
    differentiate   x, dy and dx once, 3 N C E; of each block K S of coefficients, n S more of the
                    denominator's signs, and K S of sums, which are added up once more
"""

from __future__ import annotations

from torch import Tensor

from kernel_bytes.columns import partial_bytes
from penstock.codegen import ByteCount
from penstock.ops.rational._launch import cut_blocks


def forward_bytes(x: Tensor, numerator: Tensor, denominator: Tensor) -> ByteCount:
    """Return the bytes of `forward`."""
    num_programs, of_block = _count_blocks(x, numerator, denominator)
    return ByteCount(
        loaded_bytes=x.nbytes + num_programs * of_block,
        stored_bytes=x.nbytes,
        num_launches=int(num_programs > 0),
    )


def backward_bytes(x: Tensor, numerator: Tensor, denominator: Tensor) -> ByteCount:
    """Return the bytes of `backward`."""
    num_programs, of_block = _count_blocks(x, numerator, denominator)
    of_signs = denominator.shape[1] * denominator.element_size()
    kernel = ByteCount(
        loaded_bytes=2 * x.nbytes + num_programs * (of_block + of_signs),
        stored_bytes=x.nbytes + num_programs * of_block,
        num_launches=int(num_programs > 0),
    )
    num_sums = numerator.numel() + denominator.numel()
    num_tiles = num_programs // len(numerator)
    return kernel + partial_bytes(num_tiles, num_sums, numerator.element_size())


def _count_blocks(x: Tensor, numerator: Tensor, denominator: Tensor) -> tuple[int, int]:
    """Return the programs of a launch, and the bytes of one group's coefficients."""
    (num_tiles, num_groups), _, _ = cut_blocks(x, numerator, denominator)
    num_coefficients = numerator.shape[1] + denominator.shape[1]
    return num_tiles * num_groups, num_coefficients * numerator.element_size()
