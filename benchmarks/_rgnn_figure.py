"""The ablation of `rgnn.py` as a picture, made from its rows and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from _rgnn_arms import MODELS
from _rgnn_bars import Rows, ablation
from _rgnn_graphs import GRAPHS
from _rgnn_rows import TOPIC
from _rows import REPOSITORY, read_rows, results_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = REPOSITORY / "docs" / "figures" / "rgnn-ablation.svg"


def draw(device_name: str, directory: Path, target: Path = FIGURE) -> None:
    """Bars per graph, a panel per layer: times as long as with all rewrites."""
    import matplotlib.pyplot as plt

    path = results_file(device_name, TOPIC, directory)
    found = ablation(Rows(read_rows(path))) if path.exists() else {}
    models = [model for model in MODELS if any(of == model for of, _ in found)]
    if not models:
        print(f"{path} has no ablation yet; no figure")
        return
    with plt.rc_context({"svg.hashsalt": TOPIC, "svg.fonttype": "none", "font.size": 8}):
        figure = _figure(found, models, device_name)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, metadata={"Date": None})
        plt.close(figure)
    print(f"{target.name} drawn from {len(found)} cases")


def _figure(
    found: dict[tuple[str, str], dict[str, float]], models: list[str], device_name: str
) -> Figure:
    import matplotlib.pyplot as plt

    # Rewrites that change something somewhere, "all rewrites" last.
    changing = {name for entry in found.values() for name, ratio in entry.items() if ratio != 1.0}
    order = [name for entry in found.values() for name in entry if name in changing]
    names = sorted(dict.fromkeys(order), key=lambda name: name == "all rewrites")
    figure, panels = plt.subplots(
        len(models), 1, figsize=(7.2, 2.1 * len(models)), sharex=True, squeeze=False
    )
    graphs = [graph for graph in GRAPHS if any(graph == of for _, of in found)]
    width = 0.8 / len(names)
    for panel, model in zip(panels[:, 0], models, strict=True):
        for number, name in enumerate(names):
            places = [place for place, graph in enumerate(graphs) if (model, graph) in found]
            heights = [found[model, graphs[place]].get(name, 1.0) for place in places]
            centres = [place + (number + 0.5) * width - 0.4 for place in places]
            bars = panel.bar(centres, heights, width, label=f"without {name}")
            labels = ["" if height == 1.0 else f"{height:.2f}" for height in heights]
            panel.bar_label(bars, labels, fontsize=6, padding=2)
        panel.axhline(1, color="grey", linewidth=0.6)
        panel.set_ylabel(f"{model}\ntime, all rewrites = 1")
        panel.set_xticks(range(len(graphs)), [graph.replace(" ", "\n") for graph in graphs])
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(y=0.15)
    figure.suptitle(f"A training step without rewrites, {device_name}", x=0.02, ha="left")
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, frameon=False, ncols=3, loc="upper left", bbox_to_anchor=(0.01, 0.96)
    )
    return figure
