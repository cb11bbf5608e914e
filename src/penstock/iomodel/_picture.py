"""Pictures of rooflines: a roof for each level of memory, and a point of the function under each.

Work is operations where the function has any, and else the bytes that it asks for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.compat.figures import LEGEND_OUTSIDE, encode_figure, new_figure
from penstock.iomodel._roofline import COMPUTE, Roofline
from penstock.memory.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_LINES = ("-", "--", "-.", ":")  # roofs of near levels may lie on each other
_GIGA = 1e9


def draw_roofline(function: Roofline, base: Roofline | None, machine: str, path: Path) -> None:
    """Draw the roofs of a function's levels, and a point for each; the base has hollow ones.

    Raises:
        ImportError: matplotlib is missing; the extra `viz` brings it.
    """
    figure = new_figure("a roofline", (8.5, 5))
    _draw(figure.add_subplot(), function, base, machine)
    replace_file(path, encode_figure(figure, path))


def _draw(axes: Axes, function: Roofline, base: Roofline | None, machine: str) -> None:
    both = [each for each in (function, base) if each is not None]
    has_operations = all(each.operations for each in both)
    unit = "operations" if has_operations else "bytes asked for"
    short = "Gop/s" if has_operations else "GB/s"
    points = [point for each in both for point in _find_points(each, has_operations)]
    reach = [intensity for _, _, intensity, _, _ in points] or [1.0]
    span = (min(reach) / 4, max(reach) * 4)
    for number, name in enumerate(dict.fromkeys(name for _, name, *_ in points)):
        colour = _COLOURS[number % len(_COLOURS)]
        rate = next(rate for _, each, _, _, rate in points if each == name)
        roof = [rate * end / _GIGA for end in span]
        label = f"{name}: {rate / _GIGA:.3g} GB/s" + " (binds)" * (name == function.binding_level)
        axes.plot(span, roof, _LINES[number % len(_LINES)], color=colour, label=label)
        for of, each, intensity, achieved, _ in points:
            if each == name:  # nearer levels have larger points, as several may lie on one place
                face = "none" if of is base else colour
                size = max(5, 15 - 3 * number)
                place = intensity, achieved / _GIGA
                axes.plot(*place, "o", color=colour, markerfacecolor=face, ms=size)
    most = _find_arithmetic(function) if has_operations else None
    if most is not None:
        binds = " (binds)" * (function.binding_level == COMPUTE)
        label = f"{COMPUTE}: {most / _GIGA:.3g} Gop/s{binds}"
        axes.axhline(most / _GIGA, color="#555555", label=label)
    for each in both:
        face = "none" if each is base else "#555555"
        axes.plot([], [], "o", color="#555555", markerfacecolor=face, label=each.name)
    _scale(axes, span)
    axes.set_xlabel(f"{unit}, for each byte that the level moves")
    axes.set_ylabel(f"{short} of {unit} ({_describe_time(function)} time)")
    axes.set_title(f"{function.name} on {machine}", fontsize=10)
    axes.legend(**LEGEND_OUTSIDE)
    axes.grid(visible=True, which="major", alpha=0.3)


def _scale(axes: Axes, span: tuple[float, float]) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlim=span)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))  # fewer than a decade may show
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")


def _find_points(
    of: Roofline, has_operations: bool
) -> list[tuple[Roofline, str, float, float, float]]:
    """Return of each level its name, work for each byte, work per second, and its rate."""
    work = of.operations if has_operations else of.levels[0].moved_bytes
    taken = of.measured_seconds or of.predicted_seconds
    return [
        (of, each.level, work / each.moved_bytes, work / taken,
         each.moved_bytes / of.seconds[each.level])
        for each in of.levels
        if of.seconds.get(each.level)
    ]  # fmt: skip


def _find_arithmetic(of: Roofline) -> float | None:
    taken = of.seconds.get(COMPUTE)
    return of.operations / taken if taken else None


def _describe_time(of: Roofline) -> str:
    return "predicted" if of.measured_seconds is None else "measured"
