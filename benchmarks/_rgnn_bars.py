"""Bars of the compiler, held against the rows of `rgnn.py`."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from _rgnn_arms import EDGEWISE, OURS, PYG_FAST
from _rgnn_graphs import GRAPHS, ONE_WAY
from _rgnn_rows import GEOMEAN_BAR, OUT_OF_MEMORY, RGAT_BARS, SPEEDUP_BARS, TOPIC
from _rgnn_steps import TRAINING
from _rows import BenchmarkRow, read_rows, results_file
from penstock.units import format_bytes

PEAK_FACTOR = 1.1


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar and the result."""

    what: str
    asked: str
    found: str
    is_met: bool | None
    """None where it was not measured."""


class Rows:
    """The training steps of a results file, by layer, graph and arm."""

    def __init__(self, rows: list[BenchmarkRow]) -> None:
        self.all = rows
        self._training = {
            (row.extra["model"], row.extra["graph"], row.arm): row
            for row in rows
            if row.extra.get("mode") == TRAINING
        }

    def get(self, model: str, graph: str, arm: str) -> BenchmarkRow | None:
        """Return a training step, failed or not."""
        return self._training.get((model, graph, arm))

    def ours(self, model: str, graph: str) -> BenchmarkRow | None:
        """Return our arm that the ratios are taken to."""
        for (of_model, of_graph, arm), row in self._training.items():
            is_reference = arm.startswith(OURS) and "counts" in row.extra
            if (of_model, of_graph) == (model, graph) and is_reference:
                return row
        return None

    def speedup(self, model: str, graph: str, arm: str) -> float | str | None:
        """Return its time over ours; the reason if it has no time; None if not measured."""
        row = self.get(model, graph, arm)
        if row is None:
            return None
        if row.extra["outcome"] != "ok":
            return row.extra["outcome"]
        ratio = row.extra.get("ratio_to_ours")
        return None if ratio is None else ratio["median"]


def bars(rows: Rows) -> Iterator[Bar]:
    """Return all bars of time and bytes."""
    for (model, graph, arm), factor in SPEEDUP_BARS.items():
        found = rows.speedup(model, graph, arm)
        yield _speedup_bar(f"{model} over {arm}, {graph}", factor, found)
    yield from _segment_mm_bars(rows)
    for arm, factor in RGAT_BARS.items():
        for graph in GRAPHS:
            found = rows.speedup("RGAT", graph, arm)
            if found is not None:
                yield _speedup_bar(f"RGAT over {arm}, {graph}", factor, found)
    for model in ("RGCN", "RGAT", "HGT"):
        for graph in GRAPHS:
            if (bar := _peak_bar(rows, model, graph)) is not None:
                yield bar
    yield from _survival_bars(rows)
    for row in rows.all:
        if row.limit is not None and "mode" not in row.extra:
            asked = f"below {row.limit.name}"
            is_met = row.median_seconds < row.limit.value
            yield Bar(f"{row.case}, {row.arm}", asked, f"{row.median_seconds:.3g} s", is_met)


def _speedup_bar(what: str, factor: float, found: float | str | None) -> Bar:
    if found is None or isinstance(found, str):
        return Bar(what, f"{factor:g}x", found or "not measured", None)
    return Bar(what, f"{factor:g}x", f"{found:.2f}x", found >= factor)


def _segment_mm_bars(rows: Rows) -> Iterator[Bar]:
    """Return the bars of RGCN over segment-mm on graphs with reverse edges: mean and worst."""
    found = {graph: rows.speedup("RGCN", graph, EDGEWISE) for graph in GRAPHS if graph != ONE_WAY}
    speedups = {graph: ratio for graph, ratio in found.items() if isinstance(ratio, float)}
    what = f"RGCN over {EDGEWISE}"
    if not speedups:
        yield Bar(what, f"{GEOMEAN_BAR}x", "not measured", None)
        return
    mean = statistics.geometric_mean(speedups.values())
    of = f"geometric mean of {len(speedups)} graphs"
    yield Bar(f"{what}, {of}", f"{GEOMEAN_BAR}x", f"{mean:.2f}x", mean >= GEOMEAN_BAR)
    worst = min(speedups, key=lambda graph: speedups[graph])
    ratio = speedups[worst]
    yield Bar(f"{what}, everywhere", "1x", f"{ratio:.2f}x on {worst}", ratio >= 1)


def _peak_bar(rows: Rows, model: str, graph: str) -> Bar | None:
    """Return the bar of our peak against the edgewise one's, scaled by the rows chosen."""
    ours, edgewise = rows.ours(model, graph), rows.get(model, graph, EDGEWISE)
    if ours is None or edgewise is None or ours.extra["outcome"] != "ok":
        return None
    if edgewise.extra["outcome"] != "ok":
        return None
    (peak,), (other,) = ours.peak_bytes.values(), edgewise.peak_bytes.values()
    fraction = ours.extra["rows_over_edges"]
    allowed = PEAK_FACTOR * fraction * other
    return Bar(
        f"{model} peak, {graph}: {fraction:.3f} of the edges' rows",
        f"{format_bytes(math.floor(allowed))}",
        f"{format_bytes(peak)} ({peak / other:.3f} of {EDGEWISE})",
        peak <= allowed,
    )


def _survival_bars(rows: Rows) -> Iterator[Bar]:
    """Return the bars that ours runs wherever PyG's FastRGCNConv does not."""
    for row in rows.all:
        if row.arm == PYG_FAST and row.extra["outcome"] == OUT_OF_MEMORY:
            ours = rows.ours("RGCN", row.extra["graph"])
            outcome = None if ours is None else ours.extra["outcome"]
            what = f"RGCN runs where {PYG_FAST} is out of memory, {row.case.split(', ', 1)[1]}"
            is_met = None if outcome is None else outcome == "ok"
            yield Bar(what, "runs", outcome or "not measured", is_met)


def show(device_name: str, directory: Path) -> None:
    """Print the bars and the ablation of a device's rows."""
    path = results_file(device_name, TOPIC, directory)
    if not path.exists():
        print(f"{path} has no rows yet")
        return
    rows = Rows(read_rows(path))
    table = Table(title=f"rgnn on {device_name}", title_justify="left")
    for heading in ("bar", "asked", "found", "met"):
        table.add_column(heading, justify="left" if heading == "bar" else "right")
    for bar in bars(rows):
        met = {True: "[green]yes", False: "[red]no", None: "-"}[bar.is_met]
        table.add_row(bar.what, bar.asked, bar.found, met)
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table)
    console.print(_ablation_table(rows))


def ablation(rows: Rows) -> dict[tuple[str, str], dict[str, float]]:
    """Return the slowdown of a training step without a rewrite, by layer and graph.

    A rewrite that changes nothing there has 1.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows.all:
        if row.extra.get("mode") != TRAINING or row.extra["outcome"] != "ok":
            continue
        ours = rows.ours(row.extra["model"], row.extra["graph"])
        if ours is None or not row.arm.startswith(f"{ours.arm} without "):
            continue
        entry = found.setdefault((row.extra["model"], row.extra["graph"]), {})
        for name in ours.extra.get("rewrites_that_change_nothing", ()):
            entry.setdefault(name, 1.0)
        entry[row.arm.removeprefix(f"{ours.arm} without ")] = row.extra["ratio_to_ours"]["median"]
    return found


def _ablation_table(rows: Rows) -> Table:
    found = ablation(rows)
    names = list(dict.fromkeys(name for entry in found.values() for name in entry))
    table = Table(title="times as long without a rewrite", title_justify="left")
    for heading in ("layer", "graph", *names):
        table.add_column(heading, justify="left" if heading in ("layer", "graph") else "right")
    for (model, graph), entry in sorted(found.items()):
        cells = [f"{entry[name]:.2f}" if name in entry else "" for name in names]
        table.add_row(model, graph, *cells)
    return table
