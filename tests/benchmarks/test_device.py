"""The GPU suite keeps to its time, names what is missing, goes on where it stopped, and starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

import _device
import _device_run
import _device_steps
import smoke
from _device_steps import STEPS, Step
from _rows import REPOSITORY, read_rows, results_file
from fork_servers import find_python


def test_the_suite_fits_into_three_calls_of_nine_minutes_and_eight_files():
    calls = _device.calls_of(STEPS, 60 * 9 - _device.RESERVE_SECONDS)
    assert len(calls) <= 3
    assert sum(step.seconds for step in STEPS) + 3 * _device.RESERVE_SECONDS <= 27 * 60
    assert calls[0][0] == STEPS[0] and STEPS[0].topic == "smoke"
    assert sorted(step.key for call in calls for step in call) == sorted(s.key for s in STEPS)
    # Rows of every topic of a call but the tests, the state and the log.
    for call in calls:
        assert len({step.topic for step in call} - {"tests"}) + 2 <= _device.MOST_FILES


class Script(Step):
    """A step that is a few lines of Python instead of a benchmark."""

    def command(self, device, out):
        return ["-c", self.flags[0]]


def script(name, text, **fields):
    return Script(topic="smoke", name=name, flags=(text,), **{"seconds": 60, **fields})


@pytest.fixture
def run_suite(monkeypatch, tmp_path):
    """Runs steps as the command line would: (exit status, statuses by name)."""
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(_device, "RESERVE_SECONDS", 0.0)

    def run(*steps, out="out", minutes=1.0, after=None):
        folder = tmp_path / out
        given = [str(folder), "--minutes", str(minutes), "--device", "cpu"]
        options = _device.arguments(
            [*given, *(["--after", str(tmp_path / after)] if after else [])]
        )
        folder.mkdir(exist_ok=True)
        with _device_run.Log(folder / _device.LOG) as log:
            status = _device.measure(options, list(steps), str(tmp_path / "wheels"), log)
        state = json.loads((folder / _device.STATE).read_text())["steps"]
        return status, {key.removeprefix("smoke: "): each["status"] for key, each in state.items()}

    return run


def test_steps_fail_are_cut_off_or_miss_something_by_name(run_suite):
    status, said = run_suite(
        script("good", "print('fine')"),
        script("bad", "raise SystemExit(3)"),
        script("slow", "import time; time.sleep(60)", seconds=1),
        script("no package", "", packages=("not_there_at_all",)),
        script("no data", "", data=("graphs/none.npz",)),
    )
    assert status == 1
    assert said == {
        "good": "ok",
        "bad": "FAILED (exit status 3)",
        "slow": "CUT OFF by its limit",
        "no package": "MISSING not_there_at_all",
        "no data": "MISSING $PENSTOCK_DATA/graphs/none.npz",
    }


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_second_call_does_what_the_first_left(run_suite, tmp_path, elsewhere):
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    steps = [
        script("first", count, seconds=20),
        script("long", count, seconds=1000),
        script("last", count),
    ]
    status, said = run_suite(*steps, minutes=0.5)
    left = "left to the next call"
    assert (status, list(said.values())) == (0, ["ok", left, left])
    steps[1] = script("long", count, seconds=50)
    again = {"out": "second", "after": "out"} if elsewhere else {}
    status, said = run_suite(*steps, minutes=3.0, **again)
    assert (status, list(said.values())) == (0, ["ok"] * 3)
    assert (tmp_path / "count").read_text() == "xxx"


def test_a_limit_ends_descendants_too():
    # A shell has said it within the limit, whatever else the machine does.
    text = "setsid sleep 60 & echo $!; wait"
    log = _device_run.Log(None)
    begin = time.monotonic()
    variables = {"PATH": os.environ["PATH"]}
    assert _device_run.run_limited(["sh", "-c", text], variables, 1.5, log) is None
    assert time.monotonic() - begin < 30
    number = int(log.text)
    for _ in range(50):
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True, check=False
        ).stdout.strip()
        if not state or state.startswith("Z"):
            return
        time.sleep(0.1)
    pytest.fail(f"process {number} is still there: {state}")


def test_topics_may_stand_before_or_after_options():
    for given in (
        ["out", "smoke", "tests", "--minutes", "9"],
        ["out", "--minutes", "9", "smoke", "tests"],
    ):
        options = _device.arguments(given)
        assert (options.out.name, options.topics, options.minutes) == ("out", ["smoke", "tests"], 9)


def test_unknown_topics_and_missing_directories_are_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        _device.arguments([str(tmp_path), "somethingelse"])
    assert "there is no topic somethingelse; there are smoke, tests" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        _device.arguments([])
    with pytest.raises(SystemExit, match="has no wheel; fetch some with --fetch-wheels"):
        _device.install_wheels(tmp_path, str(tmp_path / "target"))


def test_a_dry_run_starts_a_topic_and_says_what_it_would_measure(tmp_path):
    done = subprocess.run(
        ["benchmarks/device.sh", str(tmp_path), "smoke", "--dry-run"],
        cwd=REPOSITORY,
        env=_device.environment_of("", str(tmp_path)) | {"PYTHON": find_python("torch")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(("ok      penstock", "broken  penstock"))
    assert f"{len(smoke.CHECKS)} cases and arms" in done.stdout


def test_marked_tests_are_collected_without_importing_the_rest():
    python, options = find_python("torch"), ["-m", "gpu", "--collect-only", "-q"]
    command = [python, "-m", "pytest", *options, "tests/batching"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    names = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert names == {"tests/batching/test_cuda.py"}, done.stdout
    assert "deselected" not in done.stdout
    step = Step(topic="tests", name="x", seconds=1)
    assert step.num_measurements(done.stdout) == done.stdout.count("::")


@pytest.mark.parametrize("name", list(smoke.CHECKS))
def test_the_smoke_runs_on_the_cpu(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", find_python("torch"))
    row = smoke.run_check(name, smoke.Place("cpu", str(tmp_path)), _where())
    assert row.limit_fraction is not None and row.limit_fraction <= 1


def test_a_wrong_result_fails_the_smoke(monkeypatch, tmp_path, capsys):
    import torch

    right = torch.ones(3)
    for name, wrong in (("off", right * 1.01), ("nan", right * float("nan"))):
        monkeypatch.setitem(
            smoke.CHECKS, name, lambda place, wrong=wrong: iter([([wrong], [right])])
        )
    monkeypatch.setitem(smoke.CHECKS, "fine", lambda place: iter([([right], [right])]))
    arguments = ["smoke.py", "--out", str(tmp_path), "--checks", "off", "nan", "fine"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert smoke.main() == 1
    said = capsys.readouterr()
    assert "smoke: off: FAILED" in said.err and "smoke: nan: FAILED" in said.err
    (path,) = tmp_path.rglob("smoke.json")
    assert [row.case for row in read_rows(path)] == ["fine"]
    assert path == results_file(_where()["device_name"], "smoke", tmp_path)


def _where():
    from _rows import environment

    return environment("cpu")


def test_wheels_are_those_that_the_constraints_name():
    constraints = (REPOSITORY / "constraints.txt").read_text()
    assert all(f"\n{name}==" in constraints for name in _device_steps.NEEDED)
