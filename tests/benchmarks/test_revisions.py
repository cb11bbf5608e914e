"""Revisions are compared by medians over rounds; a slower one is named only beyond the spread."""

import argparse
import contextlib

import pytest

import revisions
from _rows import BenchmarkRow, write_rows


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


def test_rounds_go_on_in_a_later_call(tmp_path, monkeypatch):
    """Alternating, and without those that were stopped."""
    ran = []

    def run(command, tree, out, device):
        ran.append(tree.name)
        if len(ran) == 4:
            raise KeyboardInterrupt
        write_rows(rows(float(len(ran))), out)

    monkeypatch.setattr(revisions, "run", run)
    monkeypatch.setitem(revisions.COMMANDS, "capture", [["none.py"], ["capture.py"]])
    trees = {name: tmp_path / name for name in revisions.ORDER}
    options = argparse.Namespace(rounds=1, part=1, device="cpu")
    for number in range(3):
        with pytest.raises(KeyboardInterrupt) if number == 1 else contextlib.nullcontext():
            revisions.compare("capture", trees, options, tmp_path / "rounds")
    ((before, after),) = revisions.compare("capture", trees, options, tmp_path / "rounds")
    assert ran == ["before", "after", "after", "before", "after", "before", "before", "after"]
    assert (before.num_repetitions, before.median_seconds) == (3, 6.0)
    assert (after.num_repetitions, after.median_seconds) == (3, 5.0)
