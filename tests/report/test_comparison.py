"""Throughput against memory as it was measured: what the picture shows."""

import pytest

pytest.importorskip("matplotlib")

from matplotlib.text import Text

from penstock.report import ComparisonPoint, _comparison, draw_comparison
from penstock.report._picture import choose_unit

POINTS = [
    ComparisonPoint("stock", 4 << 30, 1000.0),
    ComparisonPoint("checkpointing", 2 << 30, 800.0),
    ComparisonPoint("1/2", 2 << 30, 990.0, curve=True),
    ComparisonPoint("1/8", 1 << 29, 900.0, curve=True),
]


@pytest.fixture
def figures(monkeypatch):
    made = []
    real = _comparison.new_figure
    monkeypatch.setattr(
        _comparison, "new_figure", lambda *args: made.append(real(*args)) or made[-1]
    )
    return made


def test_ways_are_points_and_plans_a_curve(figures, tmp_path):
    path = draw_comparison(
        POINTS, tmp_path / "new" / "memory.png", title="a model", curve="planned", unit="tokens/s"
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    (axes,) = figure.axes
    lines = {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines
    }
    assert lines == {
        "planned": ([0.5, 2.0], [900.0, 990.0]),
        "stock": ([4.0], [1000.0]),
        "checkpointing": ([2.0], [800.0]),
    }
    assert [text.get_text() for text in axes.texts] == ["1/8", "1/2"]
    assert axes.get_xlim()[0] == axes.get_ylim()[0] == 0
    assert axes.get_ylabel() == "tokens/s"


@pytest.mark.parametrize("speeds", [(880, 985, 1004, 1040), (900, 870, 1004, 800), (9, 7, 5, 3)])
def test_names_of_points_lie_on_no_line_and_no_other_name(figures, tmp_path, speeds):
    names = ("1/12", "1/4", "1/2", "no limit")
    sizes = (160 << 20, 440 << 20, 930 << 20, 1870 << 20)
    points = [ComparisonPoint(*each, curve=True) for each in zip(names, sizes, speeds, strict=True)]
    draw_comparison(points, tmp_path / "a.png", title="t", curve="planned", unit="x")
    (figure,) = figures
    (axes,) = figure.axes
    assert axes.get_xlabel() == "peak memory of training, MiB"
    (line,) = axes.lines
    path = line.get_path().transformed(line.get_transform())
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    for box in boxes:
        assert not path.intersects_bbox(box, filled=False)
        assert box.count_overlaps(boxes) == 1  # itself


def test_the_unit_of_an_axis_follows_its_length():
    assert choose_unit(138 << 20) == (1 << 20, "MiB")
    assert choose_unit(2 << 30) == (1 << 30, "GiB")


def test_without_plans_there_is_no_curve(figures, tmp_path):
    draw_comparison(POINTS[:2], tmp_path / "a.svg", title="t", curve="planned", unit="x")
    assert len(figures[0].axes[0].lines) == 2
