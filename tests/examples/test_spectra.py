"""The examples of spectra run on small inputs, draw, and return what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="penstock[viz] installs matplotlib").use("Agg")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_curvature_is_followed(tmp_path: Path, load_example, capsys):
    figure = tmp_path / "curvature.png"
    options = ["--steps", "5", "--every", "4", "--count", "2", "--texts", "8"]
    losses, curves = load_example("curvature").main([*options, "--figure", str(figure)])
    assert len(losses) == 5 and sorted(curves) == [0, 4]
    assert all(len(each) == 2 and each[0] <= each[1] for each in curves.values())
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "largest curvature" in capsys.readouterr().out


def test_laplacian_of_two_components(tmp_path: Path, store: Path, load_example, capsys):
    """The larger component, a ring of 400 nodes, whose eigenvalues are 1 - cos(2 pi j / 400)."""
    ring, other = np.arange(400), np.arange(400, 500)
    rows = np.concatenate([ring, other])
    columns = np.concatenate([np.roll(ring, -1), np.roll(other, -1)])
    np.savez(tmp_path / "graph.npz", row=rows, col=columns, shape=np.array([500, 500]))
    figure = tmp_path / "embedding.png"
    pairs = load_example("laplacian").main(
        [
            *(str(tmp_path / "graph.npz"), "--store", str(store), "--count", "5"),
            *("--budget", "1MiB", "--figure", str(figure)),
        ]
    )
    expected = np.cos(2 * np.pi * np.array([2, 2, 1, 1, 0]) / 400)
    np.testing.assert_allclose(pairs.values.numpy(), expected, atol=1e-8)
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "400 nodes, 400 edges" in capsys.readouterr().out
