"""Lanes as bars of a picture: one position per lane, divided into its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.report._figures import LEGEND_OUTSIDE, style_axes
from penstock.report._lanes import Lane, LaneKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LANE_HEIGHT = 0.8  # of the distance of two lanes


def draw_lanes(
    axes: Axes,
    lanes: Sequence[Lane],
    names: Sequence[str],
    style_of: Callable[[LaneKind, str], tuple[str, str]],
    *,
    origin_ns: int = 0,
    unit_ns: float,
    edge_width: float = 0.0,
    **legend: Any,
) -> None:
    """Draw lanes from top to bottom, with a legend of the colours.

    `style_of` returns label and colour from a lane's kind and a span's name. A line of width
    `edge_width` around spans keeps those shorter than a pixel visible.
    """
    from matplotlib.patches import Patch

    colours: dict[str, str] = {}
    for position, lane in enumerate(lanes):
        height = _LANE_HEIGHT / len(lane.rows)
        for row_index, row in enumerate(lane.rows):
            bottom = position - _LANE_HEIGHT / 2 + row_index * height
            by_colour: dict[str, list[tuple[float, float]]] = {}
            for span in row:
                label, colour = style_of(lane.kind, span.name)
                colours.setdefault(label, colour)
                by_colour.setdefault(colour, []).append(
                    ((span.start_ns - origin_ns) / unit_ns, (span.end_ns - span.start_ns) / unit_ns)
                )
            for colour, ranges in by_colour.items():
                axes.broken_barh(ranges, (bottom, height), color=colour, linewidth=edge_width)
    axes.set_yticks(range(len(lanes)), [_add_arrow(name) for name in names])
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.5)  # the first lane is on top
    style_axes(axes, grid="x")
    if lanes:
        patches = [Patch(color=colour, label=label) for label, colour in colours.items()]
        axes.legend(handles=patches, **LEGEND_OUTSIDE, **legend)


def _add_arrow(name: str) -> str:
    return name.replace("->", "\N{RIGHTWARDS ARROW}")
