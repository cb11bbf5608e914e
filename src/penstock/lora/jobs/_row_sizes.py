"""Numbers of rows for which a row's bits do not depend on the rows beside it, found by probing.

A library product of few rows takes other kernels than one of many, and rounds otherwise; and an
element-wise kernel computes the last elements of a thread's share one by one, with other functions
than those for whole vectors. So a micro-batch gets one of a few numbers of rows, of which

- every product of the base (each in_features, out_features and bias once, forward and for the
  input's gradient) was seen to give the same bits for the same row at several places, and as in the
  largest micro-batch;
- every share of a thread of an element-wise kernel is a multiple of its vectors: with E elements
  and n = min(threads, ceil(E / 32768)) shares (ATen's grain), ceil(E / n) is a multiple of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.lora.jobs._micro_batch import BLOCK_ROWS, round_up

_GRAIN = 32768  # at::internal::GRAIN_SIZE
_VECTOR = 32  # elements: two vectors of AVX-512, more than one step of any narrower set
_MOST_SIZES = 8


@dataclass(frozen=True)
class RowSizes:
    """The numbers of rows that micro-batches have.

    Attributes:
        sizes: Ascending; the last is the most that a micro-batch may have.
        is_exact: Whether products of all of these sizes were seen to keep the bits of rows.
        reason: The reason where they do not; else empty.
    """

    sizes: tuple[int, ...]
    is_exact: bool
    reason: str = ""

    @property
    def least(self) -> int:
        """Rows of the smallest micro-batch."""
        return self.sizes[0]

    @property
    def most(self) -> int:
        """Rows of the largest micro-batch."""
        return self.sizes[-1]

    def fit(self, num_rows: int) -> int:
        """Return the least size that is not below a number of rows."""
        return next(size for size in self.sizes if size >= num_rows)


def find_row_sizes(model: nn.Module, max_tokens: int) -> RowSizes:
    """Return the numbers of rows that micro-batches of a model may have.

    Args:
        model: The base model.
        max_tokens: The most rows that are asked for; the result may be above it by filler.
    """
    products = _list_products(model)
    widths = {width for layer in products for width in _features(layer)}
    is_cpu = next(model.parameters()).device.type == "cpu"
    threads = torch.get_num_threads() if is_cpu else 1
    candidates = _list_candidates(max_tokens, widths, threads)
    if not candidates:
        fallback = round_up(max_tokens, 4 * BLOCK_ROWS)
        reason = f"no number of rows is a whole number of vectors for {threads} threads"
        return RowSizes((fallback,), is_exact=False, reason=reason)
    exact = set(candidates)
    for layer in products:
        if not _returns_rows(layer):
            reason = f"{type(layer).__name__} returns more than rows, which were not compared"
            return RowSizes(tuple(candidates), is_exact=False, reason=reason)
        exact &= _probe(layer, candidates)
        if not exact:
            shape = "{} -> {}".format(*_features(layer))
            reason = f"rows of products {shape} do not keep their bits at any number of rows"
            return RowSizes(tuple(candidates), is_exact=False, reason=reason)
    if candidates[-1] not in exact:
        reason = "the largest micro-batch does not keep the bits of its rows"
        return RowSizes(tuple(candidates), is_exact=False, reason=reason)
    return RowSizes(tuple(sorted(exact)), is_exact=True)


def keeps_vectors(num_rows: int, widths: Iterable[int], threads: int) -> bool:
    """Return whether all threads' shares of element-wise kernels are whole vectors."""
    for width in widths:
        num_elements = num_rows * width
        shares = min(threads, -(-num_elements // _GRAIN))
        if -(-num_elements // shares) % _VECTOR:
            return False
    return True


def _list_candidates(max_tokens: int, widths: set[int], threads: int) -> list[int]:
    """Return numbers of rows, evenly spaced below the most, that are whole vectors."""

    def find(start: int) -> int | None:
        first = round_up(start, _VECTOR)
        numbers = range(first, first + _VECTOR * 64, _VECTOR)
        return next((n for n in numbers if keeps_vectors(n, widths, threads)), None)

    most = find(max_tokens)
    if most is None:
        return []
    steps = (find(-(-most * part // _MOST_SIZES)) for part in range(1, _MOST_SIZES))
    return sorted({step for step in steps if step is not None and step < most} | {most})


def _list_products(model: nn.Module) -> list[Any]:
    """Return one linear layer for each shape, dtype and kind that the model has."""
    from transformers.pytorch_utils import Conv1D

    found: dict[tuple[object, ...], Any] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and module.weight.is_floating_point():
            key = (type(module), *_features(module), module.bias is None, module.weight.dtype)
            found.setdefault(key, module)
    return list(found.values())


def _features(layer: Any) -> tuple[int, int]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.weight.shape[0], layer.weight.shape[1]  # Transformers' Conv1D


def _returns_rows(layer: Any) -> bool:
    """Return whether a layer makes a row of each row; routers that are linear layers do not."""
    width, num_out = _features(layer)
    try:
        with torch.no_grad():
            y = layer(layer.weight.new_zeros(1, 2, width))
    except Exception:  # it is called in a way of its own
        return False
    return isinstance(y, Tensor) and y.shape == (1, 2, num_out)


def _probe(layer: Any, candidates: Sequence[int]) -> set[int]:
    """Return the candidates whose rows have the bits that they have elsewhere."""
    weight = layer.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    most = candidates[-1]
    exact = set(candidates)
    for product, width in zip(_products(layer), _features(layer), strict=True):
        rows = torch.randn(
            most, width, generator=generator, device=weight.device, dtype=torch.float32
        ).to(weight.dtype)
        expected = product(rows)
        for shift in (BLOCK_ROWS, most // 2 + 1):
            if not torch.equal(product(rows.roll(shift, 0)), expected.roll(shift, 0)):
                exact.discard(most)
        for size in list(exact - {most}):
            for start in ((most - size) // 2 | 1, most - size):
                part = rows[start : start + size].clone()
                if not torch.equal(product(part), expected[start : start + size]):
                    exact.discard(size)
    return exact


def _products(layer: Any) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return the layer's product forward, and that for its input's gradient."""
    compared: set[tuple[str, int]] = set()

    def is_plain(kind: str, rows: Tensor) -> bool:
        """Tell that the product is to be compared with the operator's, once for each size."""
        is_new = (kind, len(rows)) not in compared
        compared.add((kind, len(rows)))
        return is_new and type(layer) is nn.Linear

    def forward(rows: Tensor) -> Tensor:
        with torch.no_grad():
            y = layer(rows[None])[0]
            if is_plain("forward", rows) and not torch.equal(y, _as_operator(layer, rows)):
                return torch.full_like(y, torch.nan)  # equals nothing: the two ways differ
        return y

    def backward(gradient: Tensor) -> Tensor:
        x = gradient.new_zeros(1, len(gradient), _features(layer)[0], requires_grad=True)
        (found,) = torch.autograd.grad(layer(x), x, gradient[None])
        if is_plain("backward", gradient) and not torch.equal(
            found[0], torch.mm(gradient, layer.weight.detach())
        ):
            return torch.full_like(found[0], torch.nan)
        return found[0]

    return forward, backward


def _as_operator(layer: nn.Linear, rows: Tensor) -> Tensor:
    """Return the product as `penstock.lora.linear` computes it, where a layer has adapters."""
    if layer.bias is None:
        return torch.mm(rows, layer.weight.t())
    return torch.addmm(layer.bias, rows, layer.weight.t())
