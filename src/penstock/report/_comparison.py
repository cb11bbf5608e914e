"""Measured throughput against memory, of several methods."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.report._figures import choose_unit, new_figure, style_axes, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#000000", "#CC79A7", "#009E73", "#D55E00", "#56B4E9")
_MARKERS = ("s", "D", "^", "v", "P")
_CURVE = "#0072B2"


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
    figure = new_figure("a comparison", (8.6, 5.0))
    axes = figure.subplots()
    most = max(point.peak_bytes for point in points)
    unit_bytes, name_of_unit = choose_unit(most)
    _draw_line(axes, [point for point in points if point.curve], unit_bytes, curve)
    _draw_points(axes, [point for point in points if not point.curve], unit_bytes)
    axes.set_xlim(0, 1.08 * most / unit_bytes)
    axes.set_ylim(0, 1.12 * max(point.throughput for point in points))
    axes.set_xlabel(f"peak memory of training, {name_of_unit}", fontsize=11)
    axes.set_ylabel(unit, fontsize=11)
    style_axes(axes)
    axes.legend(frameon=False, loc="lower right", fontsize=10)
    figure.suptitle(title, fontsize=13)
    return write_figure(figure, path)


def _draw_line(axes: Axes, points: Sequence[ComparisonPoint], unit_bytes: int, label: str) -> None:
    if not points:
        return
    points = sorted(points, key=lambda point: point.peak_bytes)
    memory = [point.peak_bytes / unit_bytes for point in points]
    speed = [point.throughput for point in points]
    axes.plot(memory, speed, color=_CURVE, marker="o", linewidth=2, label=label, zorder=3)
    for number, point in enumerate(points):
        offset, side = _place_label(speed, number)
        axes.annotate(
            point.name,
            (memory[number], speed[number]),
            xytext=offset,
            textcoords="offset points",
            ha=side,
            color=_CURVE,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
            zorder=5,
        )


def _draw_points(axes: Axes, points: Sequence[ComparisonPoint], unit_bytes: int) -> None:
    for index, point in enumerate(points):
        axes.plot(
            point.peak_bytes / unit_bytes,
            point.throughput,
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=10,
            linestyle="none",
            label=point.name,
            zorder=4,
        )


def _place_label(heights: Sequence[float], number: int) -> tuple[tuple[int, int], str]:
    """Return offset and alignment of a point's name with which it does not cover the line."""
    neighbours = [*heights[max(number - 1, 0) : number], *heights[number + 1 : number + 2]]
    if all(height <= heights[number] for height in neighbours):
        return (0, 8), "center"
    if all(height >= heights[number] for height in neighbours):
        return (0, -18), "center"
    is_rising = heights[number + 1] > heights[number]
    return ((-7, 6), "right") if is_rising else ((7, 6), "left")
