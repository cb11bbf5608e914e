"""Pictures: figures without a window, written as one file, and a timeline as one of them.

The memory of each tier is on top, the lanes are below on the same time axis, so that a write can be
seen to lower one curve and to raise the other. Legends are beside the axes and cover no data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.compat.figures import LEGEND_OUTSIDE, encode_figure, new_figure
from penstock.memory import Tier, Timeline
from penstock.memory.files import replace_file
from penstock.report._trace import Lane, LaneKind, find_bounds, sort_into_lanes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB, _GIB = 1 << 20, 1 << 30
_LANE_HEIGHT = 0.8  # of the distance of two lanes

# Okabe and Ito's palette, which colour-blind readers can tell apart. No tier shares its colour with
# an activity below it.
_TIER_COLOURS = {Tier.DEVICE: "#0072B2", Tier.HOST: "#6A3D9A", Tier.FILE: "#555555"}
_GREY = "#7F7F7F"
_STYLES = {
    "forward": ("forward", "#56B4E9"),
    "backward": ("backward", "#CC79A7"),
    LaneKind.COMPUTE: ("other compute", _GREY),
    LaneKind.WRITE: ("writes", "#E69F00"),
    LaneKind.READ: ("reads", "#009E73"),
    LaneKind.STALL: ("stalls", "#D55E00"),
    LaneKind.OTHER: ("other", _GREY),
}

MOST_MILLISECONDS = 2000  # on the axis of time; a longer one is in seconds
_LEGEND_SIZES = {"fontsize": 11, "title_fontsize": 11}
_FIGURE_WIDTH_INCHES = 13.0
_MEMORY_HEIGHT_INCHES = 3.4
_LANE_HEIGHT_INCHES = 0.55
_MARGINS_HEIGHT_INCHES = 1.7


def choose_unit(most_bytes: float) -> tuple[int, str]:
    """Return the unit of an axis that goes up to so many bytes: its bytes and its name."""
    return (_GIB, "GiB") if most_bytes >= 2 * _GIB else (_MIB, "MiB")


def style_axes(axes: Axes, *, grid: Literal["both", "x"] = "both") -> None:
    """Give axes a faint grid below the data and no frame above and to the right."""
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def write_figure(
    figure: Figure, path: str | os.PathLike[str], title: str, *, font_size: int = 13
) -> Path:
    """Write a figure, and make the directories that are missing; the suffix decides the format."""
    figure.suptitle(title, fontsize=font_size)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, encode_figure(figure, path))
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
            named = styles if lane.kind is LaneKind.COMPUTE else {}
            chosen = [styles[span.name if span.name in named else lane.kind] for span in row]
            colours |= dict(chosen)
            ranges = [
                ((span.start_ns - origin_ns) / unit_ns, (span.end_ns - span.start_ns) / unit_ns)
                for span in row
            ]
            faces = [colour for _, colour in chosen]
            axes.broken_barh(ranges, (bottom, height), color=faces, linewidth=edge_width)
    arrow = "\N{RIGHTWARDS ARROW}"
    axes.set_yticks(range(len(lanes)), [name.replace("->", arrow) for name in names])
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.5)  # the first lane is on top
    style_axes(axes, grid="x")
    if lanes:
        order = [label for label, _ in styles.values() if label in colours]
        patches = [Patch(color=colours[label], label=label) for label in dict.fromkeys(order)]
        axes.legend(handles=patches, **LEGEND_OUTSIDE, **legend)


def draw_timeline(
    timeline: Timeline, path: str | os.PathLike[str], *, title: str | None = None
) -> Path:
    """Draw a timeline: memory per tier over time, with compute, writes, reads and stalls below.

    Example:
        >>> draw_timeline(offload.timeline(), "step.png")  # doctest: +SKIP
        PosixPath('step.png')

    Args:
        timeline: The timeline, for example that of the last training step.
        path: The picture to write, replaced if it exists; the suffix decides the format
            (``.png``, ``.svg``, ``.pdf``); missing directories are made.
        title: The headline; by default it has the duration.

    Returns:
        The path of the picture.

    Raises:
        ImportError: matplotlib is missing; the extra ``viz`` brings it.
        ValueError: The suffix of ``path`` names no format that matplotlib writes.
        OSError: The file cannot be written.
    """
    lanes = sort_into_lanes(timeline)
    lanes_height = _LANE_HEIGHT_INCHES * max(1, len(lanes))
    height = _MEMORY_HEIGHT_INCHES + lanes_height + _MARGINS_HEIGHT_INCHES
    figure = new_figure("a timeline", (_FIGURE_WIDTH_INCHES, height), pads_inches=(0.12, 0.12))
    memory_axes, lane_axes = figure.subplots(
        2, 1, sharex=True, height_ratios=[_MEMORY_HEIGHT_INCHES, lanes_height]
    )
    origin_ns, end_ns = find_bounds(timeline)
    _draw_memory(memory_axes, timeline, origin_ns, end_ns)
    _draw_activity(lane_axes, lanes, origin_ns, end_ns)
    return write_figure(figure, path, title or _make_headline(timeline), font_size=15)


def _make_headline(timeline: Timeline) -> str:
    start_ns, end_ns = find_bounds(timeline)
    headline = f"One training step, forward and backward: {(end_ns - start_ns) / 1e9:.2f} s"
    if timeline.num_dropped:
        headline += f" ({timeline.num_dropped:,} later events were not recorded)"
    return headline


def _draw_memory(axes: Axes, timeline: Timeline, origin_ns: int, end_ns: int) -> None:
    highest_mib = 0.0
    for tier, samples in timeline.samples.items():
        peak_bytes = max((num_bytes for _, num_bytes in samples), default=0)
        if peak_bytes == 0:
            continue
        # The last value holds until the end of the timeline.
        times_ms = [(at_ns - origin_ns) / 1e6 for at_ns, _ in [*samples, (end_ns, 0)]]
        sizes_mib = [num_bytes / _MIB for _, num_bytes in [*samples, samples[-1]]]
        colour = _TIER_COLOURS[tier]
        digits = 0 if peak_bytes >= 10 * _MIB else 2
        label = f"{tier}: peak {peak_bytes / _MIB:,.{digits}f} MiB"
        axes.step(times_ms, sizes_mib, where="post", color=colour, linewidth=1.8, label=label)
        axes.fill_between(times_ms, sizes_mib, step="post", color=colour, alpha=0.15, linewidth=0)
        highest_mib = max(highest_mib, peak_bytes / _MIB)
    axes.set_ylim(0, highest_mib * 1.08 or 1.0)
    axes.set_ylabel("saved activations, MiB", fontsize=12)
    axes.tick_params(labelsize=11)
    style_axes(axes)
    if highest_mib:
        axes.legend(title="resident bytes by tier", **LEGEND_OUTSIDE, **_LEGEND_SIZES)
    else:
        _write_note(axes, "no resident bytes were recorded")


def _draw_activity(axes: Axes, lanes: list[Lane], origin_ns: int, end_ns: int) -> None:
    draw_lanes(
        axes,
        lanes,
        [lane.title.replace(" ", "\n", 1) for lane in lanes],
        _STYLES,
        origin_ns=origin_ns,
        unit_ns=1e6,
        edge_width=0.3,
        title="activity",
        **_LEGEND_SIZES,
    )
    axes.tick_params(labelsize=11)
    axes.set_xlabel("time, ms", fontsize=12)
    if not lanes:
        _write_note(axes, "no compute, transfer or stall was recorded")
    # An empty timeline still gets an axis of positive length.
    axes.set_xlim(0, max((end_ns - origin_ns) / 1e6, 1e-3))
    if end_ns - origin_ns > MOST_MILLISECONDS * 1_000_000:  # as in the headline
        axes.xaxis.set_major_formatter(lambda time_ms, _: f"{time_ms / 1000:g}")
        axes.set_xlabel("time, s", fontsize=12)


def _write_note(axes: Axes, text: str) -> None:
    axes.text(
        0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=12, color=_GREY
    )
