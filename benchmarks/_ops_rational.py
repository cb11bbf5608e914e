"""Rational activations: `group_rational`, the formula in torch, and that under `torch.compile`.

One step, forward and backward, at 19 million elements; its peak beyond x and the gradient of y;
and the rounding of the coefficients' gradients beside float64: of ours, of the formula's sums by
torch, and of the same terms one after the other in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from _ops_arms import OURS, TOPIC, peak_growth, timed_rows
from _rows import BenchmarkRow, Environment, Limit
from penstock.ops import group_rational

ROWS, CHANNELS, GROUPS = 25_216, 768, 8
DEGREES = (5, 4)
FORMULA, COMPILED, IN_ORDER = "formula", "formula, torch.compile", "terms in order, float32"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BARS = {FORMULA: 15.0, COMPILED: 2.0}


def formula(x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """The activation as it is written down, in float32 at least."""
    wide = x.to(numerator.dtype).unflatten(-1, (len(numerator), -1))
    p, *rest = (a[:, None] * wide**i for i, a in enumerate(numerator.unbind(1)))
    p = sum(rest, p)
    size = wide.abs()
    q = 1 + sum(b.abs()[:, None] * size ** (j + 1) for j, b in enumerate(denominator.unbind(1)))
    return (p / q).flatten(-2).to(x.dtype)


def draw(
    options: Any, dtype: torch.dtype, rows: int = ROWS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dy, x and coefficients; all but dy want gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, CHANNELS)] * 2 + [(GROUPS, DEGREES[0] + 1), (GROUPS, DEGREES[1])]
    dy, x, numerator, denominator = (torch.randn(each, generator=generator) for each in shapes)
    of = {"device": options.device, "dtype": dtype}
    coefficients = (each.to(options.device).requires_grad_() for each in (numerator, denominator))
    return dy.to(**of), x.to(**of).requires_grad_(), *coefficients  # pyright: ignore[reportReturnType]


def step(function: Callable[..., Tensor], dy: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of a step, whose output is there until its end."""
    y = function(*given)
    return torch.autograd.grad(y, given, dy)


def announce_rows(options: Any) -> list[tuple[str, str]]:
    """Return the cases and arms."""
    arms = (OURS, FORMULA, COMPILED)
    found = [(f"rational: {dtype}", arm) for dtype in DTYPES for arm in arms]
    found += [("rational: peak", OURS)]
    return found + [("rational: rounding", arm) for arm in (OURS, FORMULA, IN_ORDER)]


def measure_rows(options: Any, where: Environment) -> Iterator[BenchmarkRow]:
    """Yield the rows."""
    for name, dtype in DTYPES.items():
        dy, *given = draw(options, dtype)
        arms = {
            OURS: functools.partial(step, group_rational, dy, *given),
            FORMULA: functools.partial(step, formula, dy, *given),
            COMPILED: functools.partial(step, torch.compile(formula), dy, *given),
        }
        case = f"rational: {ROWS} x {CHANNELS}, {GROUPS} groups, {name}, forward and backward"
        yield from timed_rows(case, arms, BARS if name == "float32" else {}, options, where)
    yield peak_row(options, where)
    yield from rounding_rows(options, where)


def peak_row(options: Any, where: Environment) -> BenchmarkRow:
    """Return the row of the peak beyond x and dy: y and dx are two of x."""
    dy, x, *coefficients = draw(options, torch.float32)
    step(group_rational, dy[:100], x[:100].detach().requires_grad_(), *coefficients)
    grown = peak_growth(lambda: step(group_rational, dy, x, *coefficients), options.device)
    limit = Limit(name="output and gradient", value=2.01 * x.nbytes, unit="B")
    return BenchmarkRow.of(
        [0.0],
        topic=TOPIC,
        case=f"rational: {ROWS} x {CHANNELS}, peak beyond the input and the output's gradient",
        arm=OURS,
        peak_bytes={"device": grown},
        limit=limit,
        measured=grown,
        **where,
    )


def rounding_rows(options: Any, where: Environment) -> Iterator[BenchmarkRow]:
    """Yield the errors of the coefficients' gradients, where terms are positive."""
    dy, x, *coefficients = draw(options, torch.float32)
    dy, x = dy.abs_(), x.detach().abs_().requires_grad_()
    coefficients = [each.detach().abs_().requires_grad_() for each in coefficients]
    exact = [each.detach().double().requires_grad_() for each in (x, *coefficients)]
    wanted = torch.cat(step(formula, dy.double(), *exact)[1:], 1)
    found = {
        OURS: torch.cat(step(group_rational, dy, x, *coefficients)[1:], 1),
        FORMULA: torch.cat(step(formula, dy, x, *coefficients)[1:], 1),
        IN_ORDER: add_in_order(dy, x.detach(), *(each.detach() for each in coefficients)),
    }
    errors = {arm: float((each - wanted).norm() / wanted.norm()) for arm, each in found.items()}
    bars = {FORMULA: 1.0, IN_ORDER: 100.0}
    for arm, error in errors.items():
        limit = (
            Limit(name=f"{bars[arm]:g} x {OURS}", value=bars[arm], unit="1")
            if arm in bars
            else None
        )
        yield BenchmarkRow.of(
            [0.0],
            topic=TOPIC,
            case=f"rational: {ROWS} x {CHANNELS}, rounding of the coefficients' gradients",
            arm=arm,
            limit=limit,
            measured=error / errors[OURS] if limit else None,
            extra={"relative_error": error},
            **where,
        )


def add_in_order(dy: Tensor, x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the coefficients' gradients, each the sum of its terms one after the other."""
    found = []
    for group, (dys, xs) in enumerate(zip(dy.chunk(GROUPS, 1), x.chunk(GROUPS, 1), strict=True)):
        a, b = numerator[group], denominator[group]
        q = 1 + sum(b[j] * xs ** (j + 1) for j in range(len(b)))
        y = sum(a[i] * xs**i for i in range(len(a))) / q
        terms = [dys / q * xs**i for i in range(len(a))]
        terms += [-(dys / q) * y * xs ** (j + 1) for j in range(len(b))]
        found.append([float(np.cumsum(each.cpu().numpy().ravel())[-1]) for each in terms])
    return torch.tensor(found, device=dy.device)
