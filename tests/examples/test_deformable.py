"""The example draws frames that have moved, and learns to restore them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="penstock[viz] installs matplotlib").use("Agg")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("more", [(), ("--square", "--bound", "2")], ids=str)
def test_it_learns(example, tmp_path: Path, capsys, more):
    figure = tmp_path / "figure.png"
    options = ("--steps", "20", "--size", "16", "--width", "8", "--batch-size", "8")
    errors, curves = example.main([*options, *more, "--figure", str(figure)])
    assert figure.read_bytes().startswith(b"\x89PNG")
    for losses in curves.values():
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert set(errors) == {"deformable", "plain"}
    assert "mean squared error" in capsys.readouterr().out


def test_frames_are_the_same_scene(example):
    noisy, moved, clear = example.draw_frames(20, 24, torch.Generator().manual_seed(0))
    assert noisy.shape == moved.shape == clear.shape == (20, 1, 24, 24)
    found = 0
    for other, truth in zip(moved, clear, strict=True):
        shifts = [(y, x) for y in range(-3, 4) for x in range(-3, 4)]
        rolled = [other.roll((y, x), (1, 2))[:, 3:-3, 3:-3] for y, x in shifts]
        found += any(torch.equal(each, truth[:, 3:-3, 3:-3]) for each in rolled)
    assert found == 20
