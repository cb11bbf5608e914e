"""Revisions are compared by medians over rounds; a slower one is named only beyond the spread."""

import contextlib

import pytest

import revisions
from _rows import BenchmarkRow


def rows(*seconds):
    return [
        BenchmarkRow.of(
            [value],
            topic="capture",
            case="gpt2",
            arm="adamw",
            device_name="a cpu",
            versions={},
            commit="c0ffee",
            command="python3 benchmarks/capture.py",
        )
        for value in seconds
    ]


@pytest.mark.parametrize(
    ("after", "is_slower"),
    [((1.0, 1.1, 1.2), False), ((1.5, 1.6, 1.7), True), ((0.9, 1.11, 1.9), False)],
)
def test_slower_means_beyond_the_spread(after, is_slower):
    before = rows(0.9, 1.0, 1.1)
    one = revisions.summary(before, "before")
    two = revisions.summary(rows(*after), "after", before)
    assert (one.case, one.arm, two.arm) == ("capture: gpt2: adamw", "before", "after")
    assert one.median_seconds == 1.0
    assert two.limit_fraction == pytest.approx(two.median_seconds)
    assert revisions.describe(one, two).endswith("SLOWER") == is_slower


@pytest.mark.parametrize("name", revisions.ORDER)
def test_what_fails_is_named(name, tmp_path, capsys):
    """It ends the comparison unless it is the revision before, which may be older than a case."""
    tree = tmp_path / name
    (tree / "benchmarks").mkdir(parents=True)
    (tree / "benchmarks" / "x.py").write_text("raise SystemExit('no such model')")
    ends = pytest.raises(SystemExit, match=r"x\.py --quick failed in after:\nno such model")
    with ends if name == "after" else contextlib.nullcontext():
        revisions.run(["x.py", "--quick"], tree, tmp_path / "out", "cpu")
    assert ("x.py --quick failed in before:\nno such model" in capsys.readouterr().err) == (
        name == "before"
    )
