"""The picture is drawn for any timeline, and says in words and numbers what it shows."""

import sys
from pathlib import Path

import pytest

from penstock.memory import Link, Span, Tier, Timeline
from penstock.report import draw_timeline

pytest.importorskip("matplotlib")

MS = 1_000_000
MIB = 1 << 20


def busy_timeline(**changes: int) -> Timeline:
    return Timeline(
        start_ns=0,
        end_ns=100 * MS,
        samples={
            Tier.DEVICE: [(0, 0), (10 * MS, 48 * MIB), (40 * MS, 1 * MIB)],
            Tier.HOST: [(0, 0)],
            Tier.FILE: [(0, 0), (40 * MS, 3 * MIB)],
        },
        spans=[
            Span("compute", "forward", 0, 50 * MS),
            Span("compute", "backward", 50 * MS, 100 * MS),
            Span(Link.DEVICE_TO_FILE, "", 10 * MS, 40 * MS, 48 * MIB),
            Span(Link.DEVICE_TO_FILE, "", 12 * MS, 14 * MS, 48 * MIB),
            Span("stall", "load", 60 * MS, 60 * MS),
        ],
        **changes,
    )


def words(path: Path) -> str:
    """The text of an SVG; matplotlib keeps what it draws as comments beside the outlines."""
    return path.read_text(encoding="utf-8")


def test_a_png_of_a_readable_size(tmp_path: Path):
    path = draw_timeline(busy_timeline(), tmp_path / "new" / "step.png")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
    assert width > 1200
    assert height > 600


def test_it_says_what_it_shows(tmp_path: Path):
    text = words(draw_timeline(busy_timeline(num_dropped=1234), tmp_path / "step.svg"))
    for expected in (
        "One training step, forward and backward: 0.10 s (1,234 later events were not recorded)",
        "device: peak 48 MiB",
        "file: peak 3.00 MiB",
        "saved activations, MiB",
        "time, ms",
        "forward",
        "backward",
        "writes",
        "stalls",
    ):
        assert f"<!-- {expected} -->" in text, expected
    # No reads took place and nothing was in host memory: neither a lane nor a line for them.
    assert "<!-- reads -->" not in text
    assert "host" not in text


def test_a_long_step_has_an_axis_in_seconds(tmp_path: Path):
    long = Timeline(0, 30_000 * MS, {tier: [(0, MIB)] for tier in Tier}, [])
    text = words(draw_timeline(long, tmp_path / "long.svg"))
    assert "<!-- time, s -->" in text
    assert "<!-- 30 -->" in text
    assert "<!-- 30000 -->" not in text


def test_an_empty_timeline(tmp_path: Path):
    empty = Timeline(5, 5, {tier: [] for tier in Tier}, [])
    text = words(draw_timeline(empty, tmp_path / "empty.svg", title="Nothing yet"))
    assert "<!-- Nothing yet -->" in text
    assert "no resident bytes were recorded" in text


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"penstock\[viz\]"):
        draw_timeline(busy_timeline(), tmp_path / "step.png")


def test_an_unknown_format(tmp_path: Path):
    with pytest.raises(ValueError, match="xyz"):
        draw_timeline(busy_timeline(), tmp_path / "step.xyz")
