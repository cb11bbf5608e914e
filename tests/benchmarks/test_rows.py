"""A benchmark row survives its file, says where it was measured, and refuses to be half a row."""

import dataclasses
import json
import math
import statistics
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import _rows
from _rows import BenchmarkRow, Environment, Limit, environment, read_rows, write_rows

WHERE = Environment(
    device_name="NVIDIA H200", versions={"torch": "2.13.0"}, commit="abc", command="python3 x.py"
)


def row(*, case: str = "gpt2", arm: str = "keep", seconds: tuple[float, ...] = (1.0,)):
    return BenchmarkRow.of(seconds, topic="offload", case=case, arm=arm, **WHERE)


FULL = BenchmarkRow.of(
    [0.3, 0.1, 0.2],
    topic="offload",
    case="gpt2",
    arm="offload all",
    moved_bytes={"device->file": 2**40},
    peak_bytes={"device": 5, "file": 7},
    limit=Limit(name="write bandwidth of the disk", value=2e9, unit="B/s"),
    measured=1.5e9,
    extra={"loss": 1.25, "seconds": [0.3, 0.1, 0.2]},
    **WHERE,
)


def test_row_holds_what_the_design_asks_for():
    assert {field.name for field in dataclasses.fields(BenchmarkRow)} == {
        "topic",
        "case",
        "arm",
        "device_name",
        "versions",
        "commit",
        "command",
        "num_repetitions",
        "median_seconds",
        "quartiles_seconds",
        "moved_bytes",
        "peak_bytes",
        "limit",
        "limit_fraction",
        "extra",
    }


def test_median_and_quartiles():
    assert FULL.num_repetitions == 3
    assert FULL.median_seconds == 0.2
    assert FULL.quartiles_seconds == (pytest.approx(0.15), pytest.approx(0.25))
    assert row(seconds=(4.0,)).quartiles_seconds == (4.0, 4.0)


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=20))
def test_quartiles_enclose_the_median(seconds: list[float]):
    measured = row(seconds=tuple(seconds))
    lower, upper = measured.quartiles_seconds
    assert min(seconds) <= lower <= measured.median_seconds <= upper <= max(seconds)
    assert measured.median_seconds == statistics.median(seconds)


def test_fraction_of_the_limit():
    assert FULL.limit_fraction == 0.75
    timed = BenchmarkRow.of(
        [0.1, 0.2],
        topic="t",
        case="c",
        arm="a",
        limit=Limit(name="bar", value=0.3, unit="s"),
        **WHERE,
    )
    assert timed.limit_fraction == pytest.approx(0.5)
    assert row().limit_fraction is None
    with pytest.raises(ValueError, match="measured must be given in 'B'"):
        BenchmarkRow.of(
            [0.1], topic="t", case="c", arm="a", limit=Limit(name="bar", value=3, unit="B"), **WHERE
        )


@pytest.mark.parametrize("seconds", [(), (math.nan,), (1.0, math.inf)])
def test_times_must_be_finite(seconds: tuple[float, ...]):
    with pytest.raises(ValueError, match="seconds must be finite"):
        row(seconds=seconds)


def test_rows_survive_their_file(tmp_path):
    (path,) = write_rows([FULL, row()], tmp_path)
    assert path == tmp_path / "nvidia-h200" / "offload.json"
    assert read_rows(path) == [FULL, row()]
    assert sorted(item.name for item in path.parent.iterdir()) == ["offload.json"]


def test_one_row_a_line(tmp_path):
    (path,) = write_rows([FULL, row()], tmp_path)
    lines = path.read_text().splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("[", "]", 4)
    assert json.loads(lines[1].rstrip(","))["arm"] == "offload all"


def test_same_case_and_arm_is_replaced_in_place(tmp_path):
    write_rows([row(arm="keep"), row(arm="all")], tmp_path)
    (path,) = write_rows([row(arm="keep", seconds=(2.0,)), row(case="bert")], tmp_path)
    found = [(r.case, r.arm, r.median_seconds) for r in read_rows(path)]
    assert found == [("gpt2", "keep", 2.0), ("gpt2", "all", 1.0), ("bert", "keep", 1.0)]


def test_each_device_and_topic_has_its_file(tmp_path):
    other = dataclasses.replace(row(), device_name="AMD EPYC, 2 cores")
    third = dataclasses.replace(row(), topic="probe")
    paths = write_rows([row(), other, third], tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in paths} == {
        "nvidia-h200/offload.json",
        "amd-epyc-2-cores/offload.json",
        "nvidia-h200/probe.json",
    }


def test_a_number_that_json_cannot_hold_leaves_the_file_alone(tmp_path):
    (path,) = write_rows([row()], tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        write_rows([dataclasses.replace(row(), extra={"loss": math.nan})], tmp_path)
    assert read_rows(path) == [row()]


@pytest.mark.parametrize("text", ["", "{", "3", '{"rows": []}', '[{"topic": "offload"}]', "[[]]"])
def test_a_file_without_rows_is_named(tmp_path, text: str):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.json does not hold benchmark rows"):
        read_rows(path)


def test_missing_and_unknown_fields_are_named():
    values = FULL.to_dict()
    values["colour"] = values.pop("arm")
    with pytest.raises(ValueError, match=r"missing \['arm'\], unknown \['colour'\]"):
        BenchmarkRow.from_dict(values)


def test_environment_says_where(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(_rows.REPOSITORY / "benchmarks" / "x.py"), "--n", "a b"])
    monkeypatch.delenv("PENSTOCK_COMMIT", raising=False)
    where = environment("cpu")
    assert where["command"] == "python3 benchmarks/x.py --n 'a b'"
    assert where["device_name"].endswith("cores")
    assert {"python", "linux", "torch", "numpy"} <= where["versions"].keys()
    assert where["commit"]
    monkeypatch.setenv("PENSTOCK_COMMIT", "1234abcd")
    assert environment("cpu")["commit"] == "1234abcd"


def test_a_processor_whose_name_has_no_number_is_named_by_family_and_model():
    cpuinfo = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\n"
    assert _rows._processor_name(cpuinfo) == "AMD EPYC (family 25, model 17)"
    assert _rows._processor_name(cpuinfo.replace("EPYC", "EPYC 9354")) == "AMD EPYC 9354"
    assert _rows._processor_name("processor\t: 0\n") is None


def test_command_names_no_directory_of_this_machine(monkeypatch):
    data = _rows.REPOSITORY / "data"
    script = str(_rows.REPOSITORY / "benchmarks" / "x.py")
    for out in (["--out", "/mnt/rows"], ["--out=/mnt/rows"], ["--out", "/mnt/my rows"]):
        monkeypatch.setattr(sys, "argv", [script, *out, str(data), "--n", "1"])
        assert environment("cpu")["command"] == "python3 benchmarks/x.py data --n 1"
    for store in (["--store", "/mnt/nvme"], ["--store=/mnt/nvme"], ["--store", "/mnt/my disk"]):
        monkeypatch.setattr(sys, "argv", [script, *store, "--n", "1"])
        assert environment("cpu")["command"] == "python3 benchmarks/x.py --store STORE --n 1"


def test_line_for_the_terminal():
    assert str(FULL) == (
        "offload: gpt2: offload all: 0.2 s (0.15 to 0.25, 3 runs), "
        "0.75 of write bandwidth of the disk"
    )


def test_every_topic_has_the_common_options():
    parsed = _rows.argument_parser("x").parse_args(["--device", "cuda", "--out", "rows"])
    assert (parsed.device, str(parsed.out)) == ("cuda", "rows")
    assert _rows.argument_parser("x").parse_args([]).out == _rows.RESULTS
