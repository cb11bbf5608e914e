"""Deformable convolutions against torchvision's: arms of `ops.py`.

    /path/of/python-with-torchvision benchmarks/ops.py --part deform

torchvision has to match torch: on the CPU that is an environment of its own; elsewhere its arm is
left out, and ours is held against nothing. Steps are forward and backward of 3 x 3 kernels, with
offsets of a deviation of 1.5 pixels. Cases `peak` run in a process of their own: the growth of its
peak over the operands, and beyond operands and gradients that held against a column buffer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _ops_arms import TOPIC, peak_growth, time_arms
from _ops_spgemm import ratio_of
from _rows import BenchmarkRow, Environment, Limit
from penstock.ops import deform_conv2d

OURS, THEIRS = "penstock", "torchvision"
SPEED_BAR, BEYOND_BAR, PEAK_BAR = 2.0, 0.1, 0.4
TAPS = 9


class Case(NamedTuple):
    """A layer whose outputs are as many as its inputs."""

    batch: int
    channels: int
    size: int
    has_mask: bool = False
    groups: int = 1
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        name = f"{self.batch} x {self.channels} x {self.size} x {self.size}"
        name += ", mask" if self.has_mask else ""
        name += f", {self.groups} groups" if self.groups > 1 else ""
        return name + f", {str(self.dtype).removeprefix('torch.')}"


STEPS = (
    Case(1, 64, 32),
    Case(1, 64, 64),
    Case(8, 64, 32, has_mask=True),
    Case(1, 256, 32),
    Case(1, 256, 64),
    Case(4, 256, 32, has_mask=True),
    Case(1, 256, 32, groups=256),
    Case(1, 256, 32, dtype=torch.bfloat16),
)
PEAKS = (Case(1, 256, 64), Case(8, 256, 64))


def draw_operands(case: Case, device: str) -> tuple[list[Tensor], Tensor]:
    """Return input, offset, weight, bias, perhaps a mask, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    of_group = case.channels // case.groups
    plane = (case.batch, case.channels, case.size, case.size)
    given = [
        draw(*plane),
        1.5 * draw(case.batch, 2 * TAPS, case.size, case.size),
        draw(case.channels, of_group, 3, 3) / (of_group * TAPS) ** 0.5,
        draw(case.channels),
    ]
    if case.has_mask:
        given.append(draw(case.batch, TAPS, case.size, case.size).sigmoid())
    return [each.requires_grad_() for each in given], draw(*plane)


def find_arms() -> dict[str, Callable[..., Tensor]]:
    """Return the functions that are here; torchvision's where it loads."""
    arms: dict[str, Callable[..., Tensor]] = {OURS: deform_conv2d}
    try:
        from torchvision.ops import (  # pyright: ignore[reportMissingImports]
            deform_conv2d as theirs,
        )
    except (ImportError, RuntimeError):
        return arms
    return {**arms, THEIRS: theirs}


def run_step(function: Callable[..., Tensor], given: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Return the output and the gradients."""
    mask = given[4] if len(given) > 4 else None
    out = function(*given[:4], padding=1, mask=mask)
    return [out, *torch.autograd.grad(out, given, dout)]


def step_rows(
    case: Case, options: argparse.Namespace, where: Environment
) -> Iterator[BenchmarkRow]:
    """Yield the rows of a step."""
    given, dout = draw_operands(case, options.device)
    functions = find_arms()
    if case.dtype == torch.bfloat16:
        functions.pop(THEIRS, None)  # has no kernel of it
    results = {arm: run_step(function, given, dout) for arm, function in functions.items()}
    errors = compare(results)
    arms: dict[str, Callable[[], Any]] = {
        arm: lambda function=function: run_step(function, given, dout)
        for arm, function in functions.items()
    }
    times = time_arms(arms, options.rounds, options.device)
    limit = Limit(name=f"{SPEED_BAR} x the speed of {THEIRS}", value=SPEED_BAR, unit="1")
    for arm, seconds in times.items():
        ratio = ratio_of(times[THEIRS], seconds) if THEIRS in times else None
        is_held = arm == OURS and ratio is not None
        yield BenchmarkRow.of(
            seconds,
            topic=TOPIC,
            case=f"deform step: {case}",
            arm=arm,
            limit=limit if is_held else None,
            measured=ratio if is_held else None,
            extra={
                "speed_over_torchvision": ratio,
                "largest_difference": errors,
                "num_threads": torch.get_num_threads(),
            },
            **where,
        )


def compare(results: dict[str, list[Tensor]]) -> float | None:
    """Return the largest difference of arms, of the norm of a result; refuse one that is none."""
    if THEIRS not in results:
        return None
    pairs = zip(results[OURS], results[THEIRS], strict=True)
    error = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    assert error < 1e-3, f"{THEIRS} differs from {OURS} by {error}"
    return error


def measure_peak(case: Case, arm: str) -> tuple[float, int, int, int]:
    """Return seconds, growth of the peak, and bytes of the results and of the operands."""
    function = find_arms()[arm]
    small, small_dout = draw_operands(Case(1, 32, 8), "cpu")
    run_step(function, small, small_dout)  # what is loaded once
    given, dout = draw_operands(case, "cpu")
    results: list[Tensor] = []
    start = time.perf_counter()
    grown = peak_growth(lambda: results.extend(run_step(function, given, dout)), "cpu")
    seconds = time.perf_counter() - start
    kept = sum(each.numel() * each.element_size() for each in results)
    operands = sum(each.numel() * each.element_size() for each in [*given, dout])
    return seconds, grown, kept, operands


def peak_rows(case: Case, where: Environment) -> Iterator[BenchmarkRow]:
    """Yield the rows of the peak."""
    columns = case.batch * case.channels * TAPS * case.size**2 * 4
    found = {}
    for arm in find_arms():
        command = [sys.executable, __file__, arm, *map(str, case[:3])]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        found[arm] = json.loads(done.stdout)
    for arm, (seconds, grown, kept, operands) in found.items():
        beyond = grown - kept
        extra = {
            "beyond_operands_and_results": beyond,
            "column_buffer_bytes": columns,
            "share_of_column_buffer": beyond / columns,
        }
        if THEIRS in found:
            _, theirs, _, _ = found[THEIRS]
            extra["share_of_whole_peak"] = (grown + operands) / (theirs + operands)
        yield BenchmarkRow.of(
            [seconds],
            topic=TOPIC,
            case=f"deform peak: {case}",
            arm=arm,
            peak_bytes={"device": grown},
            limit=Limit(name="a tenth of a column buffer", value=BEYOND_BAR * columns, unit="B")
            if arm == OURS
            else None,
            measured=beyond if arm == OURS else None,
            extra=extra,
            **where,
        )


def announce_rows(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the cases and arms."""
    cases = [f"deform step: {case}" for case in STEPS]
    cases += [f"deform peak: {case}" for case in PEAKS if options.device == "cpu"]
    return [(case, arm) for case in cases if options.match in case for arm in (OURS, THEIRS)]


def measure_rows(options: argparse.Namespace, where: Environment) -> Iterator[BenchmarkRow]:
    """Yield the rows of the cases that the options name."""
    for case in STEPS:
        if options.match in f"deform step: {case}":
            yield from step_rows(case, options, where)
    for case in PEAKS:
        if options.device == "cpu" and options.match in f"deform peak: {case}":
            yield from peak_rows(case, where)


if __name__ == "__main__":
    arm, *numbers = sys.argv[1:]
    print(json.dumps(measure_peak(Case(int(numbers[0]), int(numbers[1]), int(numbers[2])), arm)))
