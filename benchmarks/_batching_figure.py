"""The results of `batching.py` as a picture, made from its rows and nothing else."""

from __future__ import annotations

import statistics
from pathlib import Path

from _rows import REPOSITORY, BenchmarkRow, read_rows, results_file
from penstock.units import format_seconds

FIGURE = REPOSITORY / "docs" / "figures" / "batching.svg"
COLORS = {
    "penstock": "#004488",
    "learned automaton": "#ddaa33",
    "ratio rule": "#bb5566",
    "by depth": "#999999",
    "published rule, 0.1": "#bb5566",
    "published rule, 0.5": "#ddaa33",
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
        figure, panels = plt.subplots(1, 3, figsize=(10.5, 2.9), layout="constrained")
        _largest(panels[0], rows)
        _schedules(panels[1], rows)
        _steps(panels[2], rows)
        for panel in panels:
            panel.spines[["top", "right"]].set_visible(False)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, metadata={"Date": None})
        plt.close(figure)
    print(f"{target.name} drawn from {len(rows)} rows")


def _bars(panel, groups, arms, value, label):
    """Bars side by side, a group each."""
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        places = [place + (number + 0.5) * width - 0.4 for place in range(len(groups))]
        bars = panel.bar(
            places, [value(group, arm) for group in groups], width, label=arm, color=COLORS[arm]
        )
        panel.bar_label(bars, fmt=label, fontsize=6, padding=1)
    panel.set_xticks(range(len(groups)), groups)
    panel.legend(frameon=False, fontsize=7)


def _largest(panel, rows: list[BenchmarkRow]) -> None:
    gains = {
        (row.case.split(" in batches of ")[0], row.arm): 100 * row.extra["gain"]
        for row in rows
        if " in batches of " in row.case
    }
    arms = ("published rule, 0.1", "published rule, 0.5", "penstock")
    names = list(dict.fromkeys(name for name, _ in gains))
    _bars(panel, names, arms, lambda name, arm: gains[name, arm], "%.0f")
    panel.set_title("largest batch, % below that of random batches", loc="left", fontsize=8)


def _schedules(panel, rows: list[BenchmarkRow]) -> None:
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.case.startswith("schedule of "):
            kind = row.case.removeprefix("schedule of ").split("-")[0]
            ratios.setdefault((kind, row.arm), []).append(row.extra["ratio"])
    kinds = list(dict.fromkeys(kind for kind, _ in ratios))
    arms = ("by depth", "learned automaton", "ratio rule", "penstock")
    _bars(panel, kinds, arms, lambda kind, arm: statistics.fmean(ratios[kind, arm]), "%.2f")
    panel.axhline(1, color="black", lw=0.6)
    panel.set_title("calls, the lower bound is 1", loc="left", fontsize=8)


def _steps(panel, rows: list[BenchmarkRow]) -> None:
    steps = {row.arm: row for row in rows if row.case.startswith("TreeLSTM")}
    seconds = [steps[arm].median_seconds for arm in reversed(STEPS)]
    colors = ["#004488" if arm.startswith("penstock") else "#999999" for arm in reversed(STEPS)]
    bars = panel.barh([arm.replace(", ", ",\n") for arm in reversed(STEPS)], seconds, color=colors)
    panel.bar_label(bars, [format_seconds(each) for each in seconds], fontsize=7, padding=2)
    alone = format_seconds(steps["node by node"].median_seconds)
    panel.set(xticks=[], xlim=(0, 1.25 * max(seconds)))
    panel.set_title(f"a TreeLSTM step (node by node: {alone})", loc="left", fontsize=8)
