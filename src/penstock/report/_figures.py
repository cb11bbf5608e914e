"""Figures without a window: made with matplotlib, and written as one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 120
_MIB, _GIB = 1 << 20, 1 << 30

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
