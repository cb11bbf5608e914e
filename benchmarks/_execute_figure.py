"""Throughput against memory of steps that ran as planned, from the rows of `execute.py`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from _execute_arms import ARMS, MODELS
from _rows import REPOSITORY, BenchmarkRow, read_rows, results_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE = REPOSITORY / "docs" / "figures" / "execute-memory.svg"
_SHOWN = 1.5  # of eager's throughput; limits beyond it bind nothing
_CURVES = {"host": ("#0072B2", "o", "host below"), "file": ("#D55E00", "^", "file below")}
_LIMIT = f"limit: the transfers at the disk's bandwidth, if below {_SHOWN:.0%}"
_COLUMNS = 3


def draw(device_name: str, directory: Path, target: Path = FIGURE) -> None:
    """A panel per model: share of eager's throughput, by share of the memory that all needs."""
    import matplotlib.pyplot as plt

    path = results_file(device_name, "execute", directory)
    rows = [
        row
        for row in (read_rows(path) if path.exists() else [])
        if row.arm in ARMS and "model" in row.extra
    ]
    models = [model for model in MODELS if any(row.extra["model"] == model for row in rows)]
    if not models:
        print(f"{path} has no rows of models; no figure")
        return
    with plt.rc_context({"svg.hashsalt": "execute", "svg.fonttype": "none", "font.size": 8}):
        height = -(-len(models) // _COLUMNS)
        figure, panels = plt.subplots(
            height, _COLUMNS, figsize=(8.4, 0.5 + 2.3 * height), sharey=True, squeeze=False
        )
        for panel, model in zip(panels.flat, models, strict=False):
            _draw_panel(panel, [row for row in rows if row.extra["model"] == model])
            panel.set_title(model, fontsize=8)
        for panel in list(panels.flat)[len(models) :]:
            panel.set_visible(False)
        panels[0, 0].set_ylim(0, 1.05 * max(map(_throughput, rows)))  # all panels share it
        for row_of_panels in panels:
            row_of_panels[0].set_ylabel("throughput, % of eager")
        figure.tight_layout(rect=(0, 0.35 / figure.get_figheight(), 1, 1))
        entries = {
            label: handle
            for panel in panels.flat
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            entries.values(), entries.keys(), frameon=False, ncols=len(entries), loc="lower center"
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, metadata={"Date": None})
        plt.close(figure)
    print(f"{target.name} drawn from {len(rows)} rows")


def _draw_panel(panel: Axes, rows: list[BenchmarkRow]) -> None:
    full = next((row for row in rows if row.arm == "full"), None)
    panel.axhline(100, color="black", linewidth=0.8, label="eager")
    for tier, (colour, marker, label) in _CURVES.items():
        found = [row for row in rows if row.arm.endswith(tier)] + ([full] if full else [])
        found.sort(key=lambda row: row.peak_bytes["device"])
        if len(found) > 1:
            panel.errorbar(
                [row.peak_bytes["device"] / 2**20 for row in found],
                [_throughput(row) for row in found],
                [*zip(*map(_spread, found), strict=True)],
                **{"marker": marker, "color": colour, "label": label, "ms": 4},
                **{"elinewidth": 0.8, "capsize": 2},
            )
    limits = sorted(
        (row.peak_bytes["device"] / 2**20, 100 * row.extra["eager_seconds_by_disk_alone"])
        for row in rows
        if (row.extra["eager_seconds_by_disk_alone"] or 2 * _SHOWN) < _SHOWN
    )
    if limits:
        memory, speed = zip(*limits, strict=True)
        panel.plot(memory, speed, "_", color="grey", ms=12, label=_LIMIT)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    panel.set_xlabel("device memory, MiB (log scale)")
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _throughput(row: BenchmarkRow) -> float:
    return 100 / statistics.median(row.extra["times_eager"])


def _spread(row: BenchmarkRow) -> tuple[float, float]:
    """From the throughput down and up to what the quartiles of the step's own times give."""
    fast, slow = row.quartiles_seconds
    ratios = (row.median_seconds / slow, row.median_seconds / fast)
    return _throughput(row) * (1 - ratios[0]), _throughput(row) * (ratios[1] - 1)
