"""Throughput against memory as a picture, made from the rows of `plan.py` and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from _plan_arms import CHECKPOINTING, GENETIC, ODSWAP, OURS, STOCK
from _plan_models import CASES
from _rows import REPOSITORY, BenchmarkRow, read_rows, results_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE = REPOSITORY / "docs" / "figures" / "plan-memory.svg"
MODELS = ("wresnet-152-10", "brnn-8k", "bert-large")
_CURVES = {OURS: ("#0072B2", "o"), ODSWAP: ("#009E73", "^"), GENETIC: ("#E69F00", "v")}
_POINTS = {STOCK: ("#000000", "s"), CHECKPOINTING: ("#CC79A7", "D")}
_LARGE_OPEN = {"markersize": 8, "markerfacecolor": "none"}  # others may lie in it


def draw(device_name: str, directory: Path, target: Path = FIGURE) -> None:
    """A panel per model: share of the ideal's speed by memory."""
    import matplotlib.pyplot as plt

    path = results_file(device_name, "plan", directory)
    rows = read_rows(path) if path.exists() else []
    of_model = {name: [row for row in rows if row.extra.get("model") == name] for name in MODELS}
    present = {name: some for name, some in of_model.items() if some}
    if not present:
        print(f"{path} has no rows of {', '.join(MODELS)}; no figure")
        return
    with plt.rc_context({"svg.hashsalt": "plan", "svg.fonttype": "none", "font.size": 8}):
        figure, panels = plt.subplots(
            1, len(present), figsize=(3.1 * len(present), 3.2), sharey=True, squeeze=False
        )
        for panel, (name, some) in zip(panels[0], present.items(), strict=True):
            _draw_panel(panel, some)
            panel.set_title(CASES[name].title, fontsize=8)
        panels[0, 0].set_ylabel("throughput, % of unlimited memory")
        figure.tight_layout(rect=(0, 0.14, 1, 1))
        entries = {
            label: handle
            for panel in panels[0]
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        figure.legend(entries.values(), entries.keys(), frameon=False, ncols=3, loc="lower center")
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, metadata={"Date": None})
        plt.close(figure)
    print(f"{target.name} drawn from {sum(map(len, present.values()))} rows")


def _draw_panel(panel: Axes, rows: list[BenchmarkRow]) -> None:
    for arm, (colour, marker) in {**_CURVES, **_POINTS}.items():
        found = sorted(
            (
                row.extra["device_bytes"] / 2**30,
                100 * row.extra["share_of_ideal"],
            )
            for row in rows
            if row.arm == arm and "share_of_ideal" in row.extra
        )
        if found:
            memory, speed = zip(*found, strict=True)
            line = "-" if arm in _CURVES else "none"
            style = {"color": colour, "marker": marker, "markersize": 4, "linestyle": line}
            panel.plot(memory, speed, label=arm, **(style | (_LARGE_OPEN if arm == STOCK else {})))
    bounds = {
        row.extra["device_bytes"] / 2**30: 100 * row.extra["ideal_seconds"] / row.limit.value
        for row in rows
        if row.arm == OURS and row.limit is not None
    }
    if bounds:
        memory, speed = zip(*sorted(bounds.items()), strict=True)
        panel.plot(memory, speed, ":", color="grey", linewidth=1, label="no plan is faster")
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    panel.set_xlabel("device memory, GiB (log scale)")
    panel.set_ylim(0, 104)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
