"""Figures without a window: made with matplotlib, and written as one file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.report._lanes import Lane, LaneKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 120
_MIB, _GIB = 1 << 20, 1 << 30
_LANE_HEIGHT = 0.8  # of the distance of two lanes

LEGEND_OUTSIDE = {
    "loc": "upper left",
    "bbox_to_anchor": (1.01, 1.0),
    "borderaxespad": 0.0,
    "frameon": False,
    "alignment": "left",
}
"""Arguments of a legend beside its axes, so that it covers no data."""


def choose_unit(most_bytes: float) -> tuple[int, str]:
    """Return the unit of an axis that goes up to so many bytes: its bytes and its name."""
    return (_GIB, "GiB") if most_bytes >= 2 * _GIB else (_MIB, "MiB")


def new_figure(
    subject: str,
    size_inches: tuple[float, float],
    *,
    pads_inches: tuple[float, float] | None = None,
) -> Figure:
    """Make an empty figure, or name the extra that brings matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError(
            f"Drawing {subject} needs matplotlib. Install it with: pip install 'penstock[viz]'"
        ) from error
    w_pad, h_pad = pads_inches or (None, None)
    figure = Figure(figsize=size_inches, layout=ConstrainedLayoutEngine(w_pad=w_pad, h_pad=h_pad))
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Axes, *, grid: Literal["both", "x"] = "both") -> None:
    """Give axes a faint grid below the data and no frame above and to the right."""
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def write_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure, and make the directories that are missing; the suffix decides the format."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
    return path


def draw_lanes(
    axes: Axes,
    lanes: Sequence[Lane],
    names: Sequence[str],
    styles: Mapping[str, tuple[str, str]],
    *,
    origin_ns: int = 0,
    unit_ns: float,
    edge_width: float = 0.0,
    **legend: Any,
) -> None:
    """Draw lanes from top to bottom, each divided into its rows, with a legend of the colours.

    `styles` has label and colour of each kind of lane, and of computations by their names. A line
    of width `edge_width` around spans keeps those shorter than a pixel visible.
    """
    from matplotlib.patches import Patch

    colours: dict[str, str] = {}
    for position, lane in enumerate(lanes):
        height = _LANE_HEIGHT / len(lane.rows)
        for row_index, row in enumerate(lane.rows):
            bottom = position - _LANE_HEIGHT / 2 + row_index * height
            by_colour: dict[str, list[tuple[float, float]]] = {}
            for span in row:
                is_named = lane.kind is LaneKind.COMPUTE and span.name in styles
                label, colour = styles[span.name if is_named else lane.kind]
                colours.setdefault(label, colour)
                by_colour.setdefault(colour, []).append(
                    ((span.start_ns - origin_ns) / unit_ns, (span.end_ns - span.start_ns) / unit_ns)
                )
            for colour, ranges in by_colour.items():
                axes.broken_barh(ranges, (bottom, height), color=colour, linewidth=edge_width)
    arrow = "\N{RIGHTWARDS ARROW}"
    axes.set_yticks(range(len(lanes)), [name.replace("->", arrow) for name in names])
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.5)  # the first lane is on top
    style_axes(axes, grid="x")
    if lanes:
        patches = [Patch(color=colour, label=label) for label, colour in colours.items()]
        axes.legend(handles=patches, **LEGEND_OUTSIDE, **legend)
