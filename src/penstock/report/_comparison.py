"""Throughput against memory, of measured methods and of plans for less and less memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.compat.figures import new_figure
from penstock.report._picture import choose_unit, style_axes, write_figure
from penstock.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (8.6, 5.0)
# Colour and marker of a curve, and of single methods; stock training and checkpointing come first.
_CURVE = ("#0072B2", "o")
_STYLES = (("#000000", "s"), ("#CC79A7", "D"), ("#009E73", "^"), ("#D55E00", "v"), ("#56B4E9", "P"))
_SINGLE = ("stock", "checkpointing")


class ComparisonPoint(NamedTuple):
    """Measured memory and throughput of one method.

    Attributes:
        name: Name of the method.
        peak_bytes: Peak memory.
        throughput: Throughput in the unit of the axis.
        curve: True for a point of the one curve; its points are labelled by their names.
    """

    name: str
    peak_bytes: int
    throughput: float
    curve: bool = False


def draw_comparison(
    points: Sequence[ComparisonPoint],
    path: str | os.PathLike[str],
    *,
    title: str,
    curve: str,
    unit: str,
) -> Path:
    """Draw throughput against memory.

    Example:
        >>> draw_comparison(points, "memory.png", title="GPT-2", curve="planned", unit="tokens/s")
        ... # doctest: +SKIP
        PosixPath('memory.png')

    Args:
        points: The methods; the best ones are above and to the left.
        path: The picture to write, replaced if it exists; the suffix decides the format.
        title: Headline.
        curve: Name of the curve.
        unit: Unit of throughput, for the axis.

    Returns:
        The path of the picture.

    Raises:
        ImportError: matplotlib is missing; the extra `viz` brings it.
        OSError: The file cannot be written.
    """
    figure = new_figure("a comparison", _SIZE_INCHES)
    axes = figure.subplots()
    unit_bytes, memory_unit = choose_unit(max(point.peak_bytes for point in points))
    places = {point: (point.peak_bytes / unit_bytes, point.throughput) for point in points}
    line = sorted((point for point in points if point.curve), key=lambda point: point.peak_bytes)
    if line:
        _plot(axes, [places[point] for point in line], curve)
    for number, point in enumerate(line):
        offset, side = _place_label([each.throughput for each in line], number)
        axes.annotate(
            point.name,
            places[point],
            xytext=offset,
            textcoords="offset points",
            ha=side,
            color=_CURVE[0],
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
            zorder=5,
        )
    for index, point in enumerate(point for point in points if not point.curve):
        _plot(axes, [places[point]], point.name, _STYLES[index % len(_STYLES)])
    axes.set_xlim(0, 1.08 * max(memory for memory, _ in places.values()))
    axes.set_ylim(0, 1.12 * max(point.throughput for point in points))
    _name_axes(axes, f"peak memory of training, {memory_unit}", unit)
    return write_figure(figure, path, title)


def _place_label(heights: Sequence[float], number: int) -> tuple[tuple[int, int], str]:
    """Return offset and alignment of a point's name with which it does not cover the line."""
    neighbours = [*heights[max(number - 1, 0) : number], *heights[number + 1 : number + 2]]
    if all(height <= heights[number] for height in neighbours):
        return (0, 8), "center"
    if all(height >= heights[number] for height in neighbours):
        return (0, -18), "center"
    is_rising = heights[number + 1] > heights[number]
    return ((-7, 6), "right") if is_rising else ((7, 6), "left")


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
        return tuple(sorted(names, key=lambda name: name in _SINGLE))

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
    figure = new_figure("a sweep", _SIZE_INCHES)
    axes = figure.subplots()
    most = max(point.device_bytes for point in sweep.points)
    unit_bytes, memory_unit = choose_unit(most)

    def place(point: SweepPoint, seconds: float) -> tuple[float, float]:
        return point.device_bytes / unit_bytes, 100 * sweep.ideal_seconds / seconds

    for name in sweep.names:
        points = sweep.curve(name)
        style = _STYLES[_SINGLE.index(name)] if name in _SINGLE else _CURVE
        label = name if len(points) > 1 else f"{name}, {format_bytes(points[0].device_bytes)}"
        _plot(axes, [place(point, point.step_seconds) for point in points], label, style)
    bound = sorted(
        place(point, point.lower_bound_seconds)
        for point in sweep.points
        if point.lower_bound_seconds
    )
    if bound:
        dotted = {"linestyle": ":", "linewidth": 1.6, "markersize": 0}
        _plot(axes, bound, "no plan is faster", ("#7F7F7F", ""), **dotted)
    if sweep.minimum_bytes is not None:
        least = sweep.minimum_bytes / unit_bytes
        axes.axvspan(0, least, color="#D55E00", alpha=0.12, linewidth=0)
        axes.text(
            least / 2, 50, "no plan found", rotation=90, ha="center", va="center", color="#8A3B00"
        )
    axes.set_xlim(0, 1.05 * most / unit_bytes)
    axes.set_ylim(0, 108)
    _name_axes(axes, f"device memory, {memory_unit}", "throughput, % of unlimited memory")
    return write_figure(figure, path, f"{sweep.title} on {sweep.machine}")


def _plot(
    axes: Axes,
    places: Sequence[tuple[float, float]],
    label: str,
    style: tuple[str, str] = _CURVE,
    **line: Any,
) -> None:
    """Draw a curve, or a single point as a larger marker; `line` has other settings of it."""
    colour, marker = style
    is_single = len(places) == 1
    settings: dict[str, Any] = {"linestyle": "none" if is_single else "-"}
    memory, speed = [each for each, _ in places], [each for _, each in places]
    settings |= {"markersize": 9 if is_single else 5, "linewidth": 2, "zorder": 3, **line}
    axes.plot(memory, speed, color=colour, marker=marker, label=label, **settings)


def _name_axes(axes: Axes, memory: str, speed: str) -> None:
    axes.set_xlabel(memory, fontsize=11)
    axes.set_ylabel(speed, fontsize=11)
    style_axes(axes)
    axes.legend(frameon=False, loc="lower right", fontsize=10)
