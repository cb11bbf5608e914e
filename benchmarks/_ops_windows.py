"""Windows and filters that depend on the position: ours, and the forms over `F.unfold`.

`local` is `local_conv2d` beside a product for each position over all windows, with filters in the
order in which each is fastest; `dynamic` is `dynamic_filter2d`; both forward and backward. `unfold`
is the bytes of windows beside those of `F.unfold`, and the time of both with their backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from _ops_arms import OURS, TOPIC, timed_rows
from _rows import BenchmarkRow, Environment, Limit
from penstock.ops import LocalConv2d, dynamic_filter2d, unfold_windows

UNFOLD = "F.unfold"
BAR, BYTES_BAR = 2.0, 0.36


@dataclasses.dataclass(frozen=True)
class Shape:
    """Images and their filters of 3 x 3."""

    samples: int
    channels: int
    outs: int
    size: int

    def __str__(self) -> str:
        return f"N {self.samples}, C {self.channels}, O {self.outs}, {self.size} x {self.size}"


LOCAL = (Shape(8, 16, 16, 32), Shape(8, 32, 32, 32), Shape(32, 16, 16, 32), Shape(1, 32, 32, 64))
DYNAMIC = (Shape(8, 64, 4, 32), Shape(2, 256, 16, 64))
"""Of these `outs` are the groups of channels that share a filter."""
WINDOWS = (Shape(8, 64, 1, 32), Shape(8, 64, 1, 64))


def local_over_unfold(x: Tensor, weight: Tensor) -> Tensor:
    """Return local filters' results by one product for each position; weights `(L, O, C * 9)`."""
    columns = functional.unfold(x, 3, padding=1)
    y = torch.bmm(columns.permute(2, 0, 1), weight.mT)
    return y.permute(1, 2, 0).reshape(x.shape[0], weight.shape[1], *x.shape[2:])


def dynamic_over_unfold(x: Tensor, filters: Tensor) -> Tensor:
    """Return dynamic filters' results by products with all windows."""
    groups = filters.shape[1]
    columns = functional.unfold(x, 3, padding=1).view(len(x), groups, -1, 3, 3, *x.shape[2:])
    return (columns * filters[:, :, None]).sum((3, 4)).flatten(1, 2)


def step(function: Callable[..., Tensor], dy: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """Return output and gradients."""
    y = function(*given)
    return y, *torch.autograd.grad(y, given, dy)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Raise AssertionError where two outputs differ."""
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error < 1e-4, f"outputs differ by {error}"


def local_arms(shape: Shape, device: str) -> dict[str, Callable[[], Any]]:
    """Return the arms of `local_conv2d`."""
    torch.manual_seed(0)
    layer = LocalConv2d(
        *(shape.channels, shape.outs, 3, shape.size), padding=1, bias=False, device=device
    )
    x = torch.randn(shape.samples, shape.channels, shape.size, shape.size, device=device)
    dy = torch.randn(shape.samples, shape.outs, shape.size, shape.size, device=device)
    weight = layer.weight.detach().permute(4, 5, 0, 1, 2, 3).flatten(0, 1).flatten(2)
    weight = weight.contiguous().requires_grad_()
    x.requires_grad_()
    assert_same(layer(x).detach(), local_over_unfold(x, weight).detach())

    def ours() -> tuple[Tensor, ...]:
        y = layer(x)
        return torch.autograd.grad(y, (x, layer.weight), dy)

    return {OURS: ours, UNFOLD: functools.partial(step, local_over_unfold, dy, x, weight)}


def dynamic_arms(shape: Shape, device: str) -> dict[str, Callable[[], Any]]:
    """Return the arms of `dynamic_filter2d`."""
    torch.manual_seed(0)
    size = (shape.size, shape.size)
    x = torch.randn(shape.samples, shape.channels, *size, device=device, requires_grad=True)
    filters = torch.randn(shape.samples, shape.outs, 3, 3, *size, device=device, requires_grad=True)
    dy = torch.randn(x.shape, device=device)
    ours = functools.partial(dynamic_filter2d, padding=1)
    assert_same(ours(x, filters).detach(), dynamic_over_unfold(x, filters).detach())
    return {
        OURS: functools.partial(step, ours, dy, x, filters),
        UNFOLD: functools.partial(step, dynamic_over_unfold, dy, x, filters),
    }


def unfold_arms(shape: Shape, device: str) -> dict[str, Callable[[], Any]]:
    """Return the arms of `unfold_windows`."""
    size = (shape.size, shape.size)
    x = torch.randn(shape.samples, shape.channels, *size, device=device, requires_grad=True)
    ours = functools.partial(unfold_windows, kernel=3, padding=1)
    theirs = functools.partial(functional.unfold, kernel_size=3, padding=1)
    return {
        OURS: functools.partial(step, ours, torch.randn(ours(x).shape, device=device), x),
        UNFOLD: functools.partial(step, theirs, torch.randn(theirs(x).shape, device=device), x),
    }


KINDS = {
    "local": (LOCAL, local_arms),
    "dynamic": (DYNAMIC, dynamic_arms),
    "unfold": (WINDOWS, unfold_arms),
}


def chosen(options: Any) -> Iterator[tuple[str, Shape, str]]:
    """Yield the cases that the options ask for, with their names."""
    for kind, (shapes, _) in KINDS.items():
        for shape in shapes:
            case = f"windows: {kind}, {shape}, 3 x 3"
            if options.match in case:
                yield kind, shape, case


def announce_rows(options: Any) -> list[tuple[str, str]]:
    """Return the cases and arms."""
    found = [(case, arm) for _, _, case in chosen(options) for arm in (OURS, UNFOLD)]
    return [*found, ("windows: local, geometric mean", UNFOLD), ("windows: bytes of windows", OURS)]


def measure_rows(options: Any, where: Environment) -> Iterator[BenchmarkRow]:
    """Yield the rows."""
    ratios = []
    for kind, shape, case in chosen(options):
        arms = KINDS[kind][1](shape, options.device)
        rows = list(timed_rows(case, arms, {}, options, where))
        yield from rows
        if kind == "local":
            ratios += [row.extra["times_of_ours"] for row in rows if row.arm == UNFOLD]
    if len(ratios) == len(LOCAL):
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        yield bar_row("windows: local, geometric mean", UNFOLD, mean, BAR, where)
    for shape in WINDOWS:
        x = torch.empty(shape.samples, shape.channels, shape.size, shape.size)
        share = unfold_windows(x, 3, padding=1).untyped_storage().nbytes()
        share /= functional.unfold(x, 3, padding=1).nbytes
        yield bar_row(f"windows: bytes of windows, {shape}, 3 x 3", OURS, share, BYTES_BAR, where)


def bar_row(case: str, arm: str, measured: float, bar: float, where: Environment) -> BenchmarkRow:
    """Return a row of a ratio that is held against a bar."""
    limit = Limit(name=f"{bar:g} of the other arm", value=bar, unit="1")
    return BenchmarkRow.of(
        [0.0], topic=TOPIC, case=case, arm=arm, limit=limit, measured=measured, **where
    )
