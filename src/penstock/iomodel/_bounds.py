"""Lower bounds of the elements that move between a fast memory and a slow one.

All are of the form of Irony, Toledo and Tiskin (2004): a computation is cut into phases of T moves
each, a phase can do at most F(T) multiplications with what it finds and what it moves, and so at
least T (X / F(T) - 1) elements move for X multiplications. They hold for algorithms that do each
multiplication of the definition and add it to one running sum by a fused multiply-add; algorithms
like Strassen's are excluded. docs/iomodel.md has the proofs.
"""

from __future__ import annotations

import math

PRODUCT_BOUND = (
    "2mnk/sqrt(M) - 2M (Smith, Lowery, Langou, van de Geijn, arXiv:1702.02017), and compulsory "
    "bytes"
)
CONVOLUTION_BOUND = (
    "2X/sqrt(KM) - 2M of X multiplications, K = ceil(R/stride)ceil(S/stride) (docs/iomodel.md, "
    "proposition 2), and compulsory bytes"
)
SPARSE_BOUND = (
    "2X/sqrt(M) - 2M of X multiplications (docs/iomodel.md, proposition 1), and compulsory bytes"
)
ATTENTION_BOUND = (
    "max over T of T (X/((M+T)^2/4d + (M+T)sqrt(2M+T)/2) - 1) of X multiplications "
    "(docs/iomodel.md, proposition 3), and compulsory bytes"
)


def product_bound(multiplications: int, fast_elements: int, reuse: int = 1) -> int:
    """Return 2X / sqrt(K M) - 2M, at least 0: moves of sums of products.

    With a + b elements of the two operands and c running sums at hand, a phase does at most
    sqrt(K a b c) multiplications (Loomis and Whitney 1949; K = 1 for products of matrices), and
    a + b + c <= M + T. T = 2M gives F = sqrt(K) M^1.5.

    Args:
        multiplications: X.
        fast_elements: M.
        reuse: K, how many weights of a window can meet the same input.
    """
    bound = 2 * multiplications / math.sqrt(reuse * fast_elements) - 2 * fast_elements
    return max(0, math.floor(bound))


def attention_bound(scores: int, head_dim: int, fast_elements: int) -> int:
    """Return the largest T (X / F(T) - 1) over some T, at least 0: moves of attention's scores.

    A score that a phase computes whole takes d multiplications, and needs a whole row of Q and one
    of K: at most ((M + T) / 2d)^2 of them. Another one has its running sum at hand when the phase
    begins or ends, or moves it: at most 2M + T of them, which Loomis and Whitney's inequality
    bounds by (M + T) / 2 sqrt(2M + T) multiplications.

    Args:
        scores: Pairs of a query and a key.
        head_dim: d.
        fast_elements: M.
    """
    best = 0.0
    for eighths in range(1, 65):
        moves = max(1.0, fast_elements * eighths / 8)
        reach = fast_elements + moves
        phase = reach**2 / (4 * head_dim) + reach / 2 * math.sqrt(2 * fast_elements + moves)
        best = max(best, moves * (scores * head_dim / phase - 1))
    return math.floor(best)
