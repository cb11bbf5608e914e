"""Figures of matplotlib without a window: made empty, and encoded as one file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.compat.packages import import_package

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 120

LEGEND_OUTSIDE = {
    "loc": "upper left",
    "bbox_to_anchor": (1.01, 1.0),
    "borderaxespad": 0.0,
    "frameon": False,
    "alignment": "left",
}
"""Arguments of a legend beside its axes, so that it covers no data."""


def new_figure(
    subject: str,
    size_inches: tuple[float, float],
    *,
    pads_inches: tuple[float, float] | None = None,
) -> Figure:
    """Make an empty figure, or name the extra that brings matplotlib."""
    import_package("matplotlib", f"drawing {subject}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    w_pad, h_pad = pads_inches or (None, None)
    figure = Figure(figsize=size_inches, layout=ConstrainedLayoutEngine(w_pad=w_pad, h_pad=h_pad))
    FigureCanvasAgg(figure)
    return figure


def encode_figure(figure: Figure, path: Path) -> bytes:
    """Return the bytes of a file in the format that the suffix of its path names, else PNG."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=_DOTS_PER_INCH, format=path.suffix[1:] or None)
    return picture.getvalue()
