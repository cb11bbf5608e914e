"""What the examples of batching share: the bar of a training run, and how a picture is saved."""

from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar():
    """What is done and said while training: description, bar, steps, time."""
    text = TextColumn("[progress.description]{task.description}")
    return Progress(text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def panels(count: int, *, width: float, height: float) -> tuple[Any, Any]:
    """A figure with panels side by side, without frames."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(width, height), layout="constrained")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def titled(axis, text):
    axis.set_title(text, loc="left", fontsize=10)


def save(figure, path):
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"the picture is {path}")
