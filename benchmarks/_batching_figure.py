"""The results of `batching.py` as a picture, made from its rows and nothing else."""

from __future__ import annotations

import statistics
from pathlib import Path

from _rows import REPOSITORY, BenchmarkRow, read_rows, results_file

FIGURE = REPOSITORY / "docs" / "figures" / "batching.svg"
COLORS = {  # one meaning each, in all panels
    "penstock": "#004488",
    "by depth": "#999999",
    "learned automaton": "#ddaa33",
    "ratio rule": "#bb5566",
    "published rule, 0.1": "#77cccc",
    "published rule, 0.5": "#228833",
}
STEPS = (
    "penstock, trees seen before",
    "by depth, penstock's engine",
    "by depth, concatenating",
    "by depth, states in one tensor",
)


def draw(device_name: str, directory: Path, target: Path = FIGURE) -> None:
    """Largest batches by data set, calls by kind of graph, and times of TreeLSTM steps."""
    import matplotlib.pyplot as plt

    path = results_file(device_name, "batching", directory)
    rows = read_rows(path)
    with plt.rc_context({"svg.hashsalt": "batching", "svg.fonttype": "none", "font.size": 8}):
        figure, panels = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
        _largest(panels[0], rows)
        _schedules(panels[1], rows)
        _steps(panels[2], rows)
        for panel in panels:
            panel.spines[["top", "right"]].set_visible(False)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, metadata={"Date": None})
        plt.close(figure)
    print(f"{target.name} drawn from {len(rows)} rows")


def _largest(panel, rows: list[BenchmarkRow]) -> None:
    arms = ("published rule, 0.1", "published rule, 0.5", "penstock")
    gains = {
        (row.case.split(" in batches of ")[0], row.arm): 100 * row.extra["gain"]
        for row in rows
        if " in batches of " in row.case and row.arm in arms
    }
    names = list(dict.fromkeys(name for name, _ in gains))
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        places = [place + (number + 0.5) * width - 0.4 for place in range(len(names))]
        values = [gains[name, arm] for name in names]
        bars = panel.bar(places, values, width, label=arm, color=COLORS[arm])
        panel.bar_label(bars, fmt="%.0f", fontsize=6, padding=1)
    panel.set_xticks(range(len(names)), names, fontsize=7)
    panel.set_ylim(min(0, 1.8 * min(gains.values())), 1.35 * max(gains.values()))
    panel.axhline(0, color="black", lw=0.6)
    panel.set_ylabel("%")
    panel.legend(frameon=False, fontsize=7, loc="upper right")
    panel.set_title("largest batch: below that of random batches", loc="left", fontsize=8)


def _schedules(panel, rows: list[BenchmarkRow]) -> None:
    """A point for each arm: most are equal, and bars of equal height would say nothing."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.case.startswith("schedule of "):
            kind = row.case.removeprefix("schedule of ").split("-")[0]
            ratios.setdefault((kind, row.arm), []).append(row.extra["ratio"])
    kinds = list(dict.fromkeys(kind for kind, _ in ratios))[::-1]
    arms = ("by depth", "ratio rule", "learned automaton", "penstock")
    for number, arm in enumerate(arms):
        values = [statistics.fmean(ratios[kind, arm]) for kind in kinds]
        places = [place + 0.27 - 0.18 * number for place in range(len(kinds))]
        panel.plot(values, places, "o", ms=4.5, label=arm, color=COLORS[arm])
    for place in range(len(kinds) - 1):
        panel.axhline(place + 0.5, color="0.9", lw=0.6)
    panel.axvline(1, color="black", lw=0.6)
    panel.set_yticks(range(len(kinds)), kinds, fontsize=7)
    panel.set(xlim=(0, None), ylim=(-0.5, len(kinds) + 0.9), xlabel="calls over the lower bound")
    panel.legend(frameon=False, fontsize=7, loc="upper left", ncols=2)
    panel.set_title("schedules (means; the line is the bound)", loc="left", fontsize=8)


def _steps(panel, rows: list[BenchmarkRow]) -> None:
    steps = {row.arm: row for row in rows if row.case.startswith("TreeLSTM")}
    arms = STEPS[::-1]
    milliseconds = [1000 * steps[arm].median_seconds for arm in arms]
    colors = [COLORS["penstock" if arm.startswith("penstock") else "by depth"] for arm in arms]
    bars = panel.barh([arm.replace(", ", ",\n") for arm in arms], milliseconds, color=colors)
    panel.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    panel.tick_params(axis="y", labelsize=7)
    alone = 1000 * steps["node by node"].median_seconds
    panel.set(xlim=(0, 1.15 * max(milliseconds)), xlabel=f"ms (node by node: {alone:.0f})")
    panel.set_title("a TreeLSTM step, forward and backward", loc="left", fontsize=8)
