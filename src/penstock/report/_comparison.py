"""Ways to train, measured: throughput against memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.report._figures import new_figure, unit_of_axis, write_figure

_COLOURS = ("#000000", "#CC79A7", "#009E73", "#D55E00", "#56B4E9")
_MARKERS = ("s", "D", "^", "v", "P")
_CURVE = "#0072B2"


class Measured(NamedTuple):
    """A way to train as it was measured.

    Attributes:
        name: What it is called.
        peak_bytes: Memory that it took at most.
        throughput: Of whatever the axis says, per second.
        curve: Whether it is a point of the one curve, whose points are labelled by their names.
    """

    name: str
    peak_bytes: int
    throughput: float
    curve: bool = False


def draw_comparison(
    points: Sequence[Measured],
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
        points: Ways to train; more is better upwards, less is better to the left.
        path: The picture to write, replaced when it exists; the suffix decides the format.
        title: Headline.
        curve: What the curve is called.
        unit: Of throughput, for the axis.

    Returns:
        The path of the picture.

    Raises:
        ImportError: matplotlib is missing; the extra `viz` brings it.
        OSError: The file cannot be written.
    """
    figure = new_figure("a comparison", (8.6, 5.0))
    axes = figure.subplots()
    most = max(point.peak_bytes for point in points)
    unit_bytes, name_of_unit = unit_of_axis(most)
    line = sorted((p for p in points if p.curve), key=lambda p: p.peak_bytes)
    if line:
        memory = [point.peak_bytes / unit_bytes for point in line]
        speed = [point.throughput for point in line]
        axes.plot(memory, speed, color=_CURVE, marker="o", linewidth=2, label=curve, zorder=3)
        for number, point in enumerate(line):
            offset, side = _beside_line(speed, number)
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
    for index, point in enumerate(each for each in points if not each.curve):
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
    axes.set_xlim(0, 1.08 * most / unit_bytes)
    axes.set_ylim(0, 1.12 * max(point.throughput for point in points))
    axes.set_xlabel(f"peak memory of training, {name_of_unit}", fontsize=11)
    axes.set_ylabel(unit, fontsize=11)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=10)
    figure.suptitle(title, fontsize=13)
    return write_figure(figure, path)


def _beside_line(heights: Sequence[float], number: int) -> tuple[tuple[int, int], str]:
    """Where the name of a point of a line goes, in points, and to which side: off the line."""
    neighbours = [*heights[max(number - 1, 0) : number], *heights[number + 1 : number + 2]]
    if all(height <= heights[number] for height in neighbours):
        return (0, 8), "center"
    if all(height >= heights[number] for height in neighbours):
        return (0, -18), "center"
    is_rising = heights[number + 1] > heights[number]
    return ((-7, 6), "right") if is_rising else ((7, 6), "left")
