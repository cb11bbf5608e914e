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

ALL = "all rewrites"
FIGURE = REPOSITORY / "docs" / "figures" / "rgnn-ablation.svg"


def draw(device_name: str, directory: Path, target: Path = FIGURE) -> None:
    """Draw a table per layer, of graphs and rewrites: the ratio of a step without one."""
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
    """Return a table for each layer: a row per graph, a column per rewrite that changes any."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    changing = {name for entry in found.values() for name, ratio in entry.items() if ratio != 1.0}
    order = [name for entry in found.values() for name in entry if name in changing]
    names = sorted(dict.fromkeys(order), key=lambda name: name == ALL)
    graphs = {model: [g for g in GRAPHS if (model, g) in found] for model in models}
    num_rows = [len(graphs[model]) for model in models]
    figure, panels = plt.subplots(
        len(models),
        1,
        figsize=(7.2, 1.0 + 0.24 * sum(num_rows)),
        height_ratios=num_rows,
        squeeze=False,
        layout="constrained",
    )
    colours = LinearSegmentedColormap.from_list("slower", ["#FFFFFF", "#0072B2"])
    most = max(ratio for entry in found.values() for ratio in entry.values())
    for panel, model in zip(panels[:, 0], models, strict=True):
        ratios = [[found[model, graph].get(name, 1.0) for name in names] for graph in graphs[model]]
        panel.imshow(ratios, cmap=colours, norm=LogNorm(1.0, most, clip=True), aspect="auto")
        for row, of_graph in enumerate(ratios):
            for column, ratio in enumerate(of_graph):
                text = "\u2013" if ratio == 1.0 else f"{ratio:.2f}"
                shade = "white" if ratio > most**0.6 else "black"
                panel.text(column, row, text, ha="center", va="center", color=shade)
        panel.set_yticks(range(len(ratios)), graphs[model])
        panel.set_ylabel(model, fontweight="bold")
        panel.set_xticks([])
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
        for line in range(1, len(ratios)):
            panel.axhline(line - 0.5, color="white", linewidth=1)
    panels[0, 0].xaxis.tick_top()
    panels[0, 0].set_xticks(
        range(len(names)), ["\n".join(["without", *name.split()]) for name in names]
    )
    figure.align_ylabels()
    figure.suptitle(
        f"Time of a training step without a rewrite, with all of them = 1; \u2013: it changes "
        f"nothing there\n{device_name}",
        fontsize=8,
        x=0.01,
        ha="left",
    )
    return figure
