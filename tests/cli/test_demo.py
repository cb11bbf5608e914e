"""The demo from end to end with a model that is far too small, and what it says about results."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from fork_servers import find_python
from penstock.cli import demo
from penstock.cli.demo import _training

SOURCE = Path(__file__).resolve().parents[2] / "src"


def result(arm: str, *, losses: tuple[float, ...] = (5.5, 4.0), weights: str = "abc"):
    return demo.ArmResult(
        arm=arm,
        peak_bytes=1 << 30,
        step_seconds=(1.0,),
        losses=losses,
        weights_sha256=weights,
    )


def test_the_whole_demo_small(probed_store: Path, tmp_path: Path):
    out = tmp_path / "results"
    done = subprocess.run(
        [
            find_python("libraries"), "-m", "penstock", "demo", "--out", str(out), "--steps", "2",
            "--policy", "all", "--min-bytes", "4KiB", "--hidden-size", "32", "--layers", "1",
            "--heads", "2", "--sequence-length", "64", "--batch-size", "4", "--plan-seconds", "0.1",
            "--store", str(probed_store),
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    planned = [f"planned, 1/{divisor}" for divisor in (2, 4, 8)]
    for arm in ("stock PyTorch", "checkpointing", "Penstock", *planned):
        assert f"{arm:<13}  step 3 of 3" in done.stdout  # progress
        assert f"\n  {arm}  " in done.stdout  # the table
    assert "all 3 losses and the weights are equal bit for bit" in done.stdout
    for name in ("memory.png", "timeline.png", "timeline.trace.json", "report.json"):
        assert str(out / name) in done.stdout
    assert sorted(path.name for path in out.iterdir()) == [
        "demo.json",
        "memory.png",
        "report.json",
        "timeline.png",
        "timeline.trace.json",
    ]
    numbers = json.loads((out / "demo.json").read_text())
    assert numbers["bitwise_equal"] is True
    assert [arm["arm"] for arm in numbers["arms"]] == [
        *("stock", "checkpoint", "penstock"),
        *("planned-2", "planned-4", "planned-8"),
    ]
    for arm in numbers["arms"]:
        assert (len(arm["step_seconds"]), len(arm["losses"])) == (2, 3)
        assert arm["peak_bytes"] > 0
    offloaded = json.loads((out / "report.json").read_text())["offload"]
    assert offloaded["num_steps"] == 3
    assert offloaded["bytes_read"] > 0


def test_sigterm_leaves_no_folder(real_disk: Path, tmp_path: Path):
    command = [find_python("libraries"), "-m", "penstock", "demo", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not list(tmp_path.glob("plans-*")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not list(tmp_path.iterdir())


def test_a_difference_is_said():
    stock = result("stock")
    assert "equal bit for bit" in demo.state_verdict(stock, result("penstock"), equal=True)
    verdict = demo.state_verdict(stock, result("penstock", losses=(5.5, 4.1)), equal=False)
    assert "DIFFER: 1 of 2 losses" in verdict
    assert "weights are equal" in verdict
    verdict = demo.state_verdict(stock, result("penstock", weights="xyz"), equal=False)
    assert "weights are different" in verdict


def test_a_slow_or_unsteady_machine_is_said():
    steady = dataclasses.replace(result("stock"), step_seconds=(1.0, 1.1, 1.2))
    assert list(demo.list_remarks(steady, 3)) == []
    assert ["slow" in remark for remark in demo.list_remarks(steady, 6)] == [True]
    unsteady = dataclasses.replace(steady, step_seconds=(1.0, 1.1, 2.0))
    (remark,) = demo.list_remarks(unsteady, 3)
    assert "between 1.00 s and 2.00 s" in remark


def test_an_arm_that_dies_is_reported_with_its_last_words():
    code = "import sys; print('{}', flush=True); sys.stdin.readline(); sys.exit('killed it')"
    with demo.Arm("checkpoint", [sys.executable, "-c", code]) as arm:
        arm.wait_until_loaded()
        with pytest.raises(demo.DemoError, match=r"(?s)checkpointing.*status 1.*killed it"):
            arm.take_step()


def test_an_arm_is_ended_with_the_demo():
    code = "import time; print('{}', flush=True); time.sleep(600)"
    with demo.Arm("stock", [sys.executable, "-c", code]) as arm:
        arm.wait_until_loaded()
    assert arm._process.returncode == -9


class SlowArm:
    """An arm whose steps take no time but say that they did."""

    name = "stock"

    def __init__(self) -> None:
        self.num_steps = 0

    def wait_until_loaded(self) -> None:
        pass

    def take_step(self) -> dict[str, float]:
        self.num_steps += 1
        return {"seconds": 100.0, "loss": 5.0}


def test_a_slow_machine_takes_fewer_steps():
    arms = [SlowArm(), SlowArm()]
    demo.take_turns(arms, 6, 0.0, lambda text, done: None)  # type: ignore[arg-type]
    assert [arm.num_steps for arm in arms] == [3, 3]  # the warm-up and two measured ones
    arms = [SlowArm(), SlowArm()]
    demo.take_turns(arms, 6, float("inf"), lambda text, done: None)  # type: ignore[arg-type]
    assert [arm.num_steps for arm in arms] == [7, 7]


def test_the_text_is_python_and_the_same_every_time():
    text = _training._read_corpus()
    assert len(text) > 1 << 20
    assert b"import" in text
    assert _training._read_corpus() == text
