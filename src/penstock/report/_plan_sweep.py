"""Throughput against memory: the curve of plans, and stock training beside it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.report._figures import choose_unit, new_figure, style_axes, write_figure
from penstock.units import format_bytes

# Colour and marker of each method.
_STYLES = {
    "stock": ("#000000", "s"),
    "checkpointing": ("#CC79A7", "D"),
    "plans": ("#0072B2", "o"),
    "bound": ("#7F7F7F", ""),
}


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """Memory and time of one method, or of one plan.

    Attributes:
        name: `"stock"`, `"checkpointing"`, or the name of the curve.
        device_bytes: Device memory.
        step_seconds: Time of a step.
        lower_bound_seconds: Lower bound of the time with this memory; None if it was not computed.
    """

    name: str
    device_bytes: int
    step_seconds: float
    lower_bound_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the point as plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Plans for less and less memory.

    Attributes:
        title: Name of the model.
        machine: Name of the machine.
        ideal_seconds: Time of a step with unlimited memory.
        points: Points of all methods, in any order.
        minimum_bytes: Below this no plan was found; None if the sweep did not get there.
    """

    title: str
    machine: str
    ideal_seconds: float
    points: tuple[SweepPoint, ...]
    minimum_bytes: int | None = None

    def curve(self, name: str) -> list[SweepPoint]:
        """Return the points of one method, sorted by memory."""
        return sorted((p for p in self.points if p.name == name), key=lambda p: p.device_bytes)

    @property
    def names(self) -> tuple[str, ...]:
        """Methods that have points, curves first."""
        names = tuple(dict.fromkeys(point.name for point in self.points))
        return tuple(sorted(names, key=lambda name: name in ("stock", "checkpointing")))

    def to_dict(self) -> dict[str, Any]:
        """Return the sweep as plain data for JSON."""
        return {**asdict(self), "points": [point.to_dict() for point in self.points]}


def draw_sweep(sweep: Sweep, path: str | os.PathLike[str]) -> Path:
    """Draw throughput against memory.

    Example:
        >>> draw_sweep(sweep, "sweep.png")  # doctest: +SKIP
        PosixPath('sweep.png')

    Args:
        sweep: The sweep.
        path: The picture to write, replaced if it exists; the suffix decides the format.

    Returns:
        The path of the picture.

    Raises:
        ImportError: matplotlib is missing; the extra `viz` brings it.
        ValueError: The suffix of `path` names no format that matplotlib writes.
        OSError: The file cannot be written.
    """
    figure = new_figure("a sweep", (8.6, 5.0))
    axes = figure.subplots()
    most = max(point.device_bytes for point in sweep.points)
    unit_bytes, name_of_unit = choose_unit(most)
    _draw_curves(axes, sweep, unit_bytes)
    _draw_bound(axes, sweep, unit_bytes)
    if sweep.minimum_bytes is not None:
        least = sweep.minimum_bytes / unit_bytes
        axes.axvspan(0, least, color="#D55E00", alpha=0.12, linewidth=0)
        axes.text(
            least / 2, 50, "no plan found", rotation=90, ha="center", va="center", color="#8A3B00"
        )
    axes.set_xlim(0, 1.05 * most / unit_bytes)
    axes.set_ylim(0, 108)
    axes.set_xlabel(f"device memory, {name_of_unit}", fontsize=11)
    axes.set_ylabel("throughput, % of unlimited memory", fontsize=11)
    style_axes(axes)
    axes.legend(frameon=False, loc="lower right", fontsize=10)
    figure.suptitle(f"{sweep.title} on {sweep.machine}", fontsize=13)
    return write_figure(figure, path)


def _draw_curves(axes: Any, sweep: Sweep, unit_bytes: int) -> None:
    for name in sweep.names:
        points = sweep.curve(name)
        colour, marker = _STYLES.get(name, _STYLES["plans"])
        memory = [point.device_bytes / unit_bytes for point in points]
        speed = [100 * sweep.ideal_seconds / point.step_seconds for point in points]
        single = len(points) == 1
        axes.plot(
            memory,
            speed,
            color=colour,
            marker=marker,
            markersize=9 if single else 5,
            linestyle="none" if single else "-",
            linewidth=2,
            label=name if len(points) > 1 else f"{name}, {format_bytes(points[0].device_bytes)}",
            zorder=3,
        )


def _draw_bound(axes: Any, sweep: Sweep, unit_bytes: int) -> None:
    bounded = sorted(
        (p.device_bytes / unit_bytes, 100 * sweep.ideal_seconds / p.lower_bound_seconds)
        for p in sweep.points
        if p.lower_bound_seconds
    )
    if bounded:
        axes.plot(
            [memory for memory, _ in bounded],
            [speed for _, speed in bounded],
            color=_STYLES["bound"][0],
            linestyle=":",
            linewidth=1.6,
            label="no plan is faster",
        )
