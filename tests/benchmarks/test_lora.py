"""The arms of the LoRA benchmark compute the same, and rows and bars say what was measured."""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import _lora_bars
import _lora_jobs
import _lora_layers
import _lora_training
import lora
from _lora_arms import (
    ADD_INTO,
    BASE,
    COMPILED,
    FORWARD,
    OURS,
    PEFT,
    UNSLOTH,
    LayerStep,
    Operands,
    Shape,
    make_step,
    reason_against,
)
from _lora_models import Model, base_bytes, live_base_bytes
from _lora_packing import draw_jobs, packing_rows
from _rows import REPOSITORY, BenchmarkRow, Environment, Limit, read_rows
from fork_servers import find_python

pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("one_thread")

WHERE = Environment(device_name="A CPU", versions={}, commit="abc", command="python3 x.py")
TINY = ("--hidden", "32", "--layers", "1", "--heads", "2")
MODEL = {"hidden": 32, "layers": 1, "heads": 2, "vocab": 64}


def shape_of(dropout: float) -> Shape:
    return Shape(rows=24, width=32, rank=4, dropout=dropout)


def results(name: str, shape: Shape, operands: Operands) -> list[torch.Tensor]:
    step = make_step(name, shape, operands)
    torch.manual_seed(0)
    y = step().detach()
    return [y, *(leaf.grad.clone() for leaf in operands.leaves if leaf.grad is not None)]


@pytest.mark.parametrize(
    ("name", "dropout"), [(OURS, 0.0), (ADD_INTO, 0.0), (ADD_INTO, 0.3), (COMPILED, 0.0)]
)
def test_arms_compute_what_peft_does(name, dropout, monkeypatch):
    if name == COMPILED:  # traced as for inductor, whose kernels would be compiled for a minute
        compiler = torch.compile
        monkeypatch.setattr(
            torch, "compile", lambda layer, **given: compiler(layer, backend="eager", **given)
        )
    shape = shape_of(dropout)
    operands = Operands.draw(shape)
    expected, found = (results(each, shape, operands) for each in (PEFT, name))
    assert len(found) == len(expected) == 4
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_our_arm_has_another_mask_in_each_call():
    shape = shape_of(0.5)
    step = make_step(OURS, shape, Operands.draw(shape))
    assert not torch.equal(step(), step())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_saved_bytes_are_those_of_activations(dropout):
    shape = shape_of(dropout)
    x, hidden = 4 * shape.rows * shape.width, 4 * shape.rows * shape.rank
    expected = {
        OURS: x + hidden,
        PEFT: x + hidden if dropout == 0 else 2 * x + hidden,  # its input, masked, and the mask
        ADD_INTO: x if dropout == 0 else x + x // 4,
        BASE: 0,
    }
    for name, num_bytes in expected.items():
        found, integers = make_step(name, shape, Operands.draw(shape)).saved_bytes()
        assert found == num_bytes, name
        assert integers == (8 if name == OURS and dropout else 0), name  # the seed


def test_the_peak_is_that_of_tensors_alive_at_once():
    def run() -> None:
        first = torch.empty(1 << 20, dtype=torch.uint8)
        del first
        torch.empty(3 << 20, dtype=torch.uint8)

    assert _lora_layers.peak_of(run, "cpu") == 3 << 20


def test_arms_take_turns_and_short_ones_are_run_once_more(monkeypatch):
    order: list[str] = []

    class Said(LayerStep):
        def __init__(self, name: str) -> None:
            super().__init__(lambda: torch.empty(0), Operands.draw(shape_of(0)))
            self.name = name

        def __call__(self) -> torch.Tensor:
            order.append(self.name)
            return torch.empty(0)

    monkeypatch.setattr(_lora_layers, "LEAST_ROUNDS", 2)
    steps: dict[str, LayerStep] = {name: Said(name) for name in "ab"}
    seconds = _lora_layers.measure(steps, budget_seconds=0.0)
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}
    assert "".join(order) == "ab" + "aabb" + "bbaa"


def test_rows_of_a_layer_hold_ratios_bytes_and_reasons():
    shape = shape_of(0.1)
    names = (PEFT, OURS, BASE, UNSLOTH)
    rows = {row.arm: row for row in _lora_layers.layer_rows(names, shape, "cpu", 0.1, WHERE)}
    assert set(rows) == {PEFT, OURS, BASE}
    ours = rows[OURS]
    assert ours.peak_bytes["saved"] == ours.extra["most_saved_bytes"]
    assert ours.limit_fraction == pytest.approx(ours.extra["ratio_to_peft"]["median"] / 1.03)
    assert rows[PEFT].extra["ratio_to_peft"]["median"] == 1
    assert ours.extra["not_run"] == {UNSLOTH: "Unsloth needs a GPU"}
    assert ours.peak_bytes["step"] < rows[PEFT].peak_bytes["step"]


def test_reasons_against_unsloth():
    assert reason_against(UNSLOTH, shape_of(0.1), "cuda") == "Unsloth's functions have no dropout"
    assert reason_against(OURS, shape_of(0.1), "cuda") is None


def test_an_arm_that_fails_is_left_out_with_its_reason(monkeypatch):
    def fail(name, *arguments):
        if name == ADD_INTO:
            raise RuntimeError("no\nreason")
        return make_step(name, *arguments)

    monkeypatch.setattr(_lora_layers, "make_step", fail)
    steps, not_run = _lora_layers.prepare((PEFT, ADD_INTO), shape_of(0), "cpu")
    assert list(steps) == [PEFT] and not_run == {ADD_INTO: "RuntimeError: no"}
    monkeypatch.setattr(_lora_layers, "make_step", lambda *_: fail(ADD_INTO))
    with pytest.raises(RuntimeError, match="no"):
        _lora_layers.prepare((PEFT,), shape_of(0), "cpu")


def test_two_processes_run_one_arm_at_once(monkeypatch):
    monkeypatch.setattr(sys, "executable", find_python("libraries"))
    monkeypatch.setattr(_lora_layers, "PEFT", ADD_INTO)  # spares two imports of PEFT
    names, shape = (ADD_INTO, OURS), shape_of(0.1)
    rows = _lora_layers.crowded_rows(
        shape, names=names, rounds=2, num_steps=2, threads=1, where=WHERE
    )
    assert [row.arm for row in rows] == list(names)
    assert all(row.num_repetitions == 2 and row.median_seconds > 0 for row in rows)


# ------------------------------------------------------------------ training and jobs


def options_of(**given: Any) -> argparse.Namespace:
    usual = {"threads": 1, "device": "cpu", "steps": 1, "warmup": 1, "rank": 16}
    return argparse.Namespace(**{**usual, **MODEL, **given})


def test_training_tells_growth_state_and_losses():
    told = {
        arm: _lora_training.run(options_of(arm=arm, tokens=64, dropout=0.1)) for arm in (PEFT, OURS)
    }
    model = Model(**MODEL)
    adapters = sum(
        p.numel() for name, p in _peft_model(model).named_parameters() if "lora_" in name
    )
    for each in told.values():
        assert each["base_bytes"] == base_bytes(model.build())
        # AdamW's two moments, and the number of steps of each of 14 matrices.
        assert each["state_bytes"] == 2 * 4 * adapters + 4 * 14
        assert len(each["losses"]) == 3 and len(each["seconds"]) == 1
    assert told[OURS]["growth_bytes"] < told[PEFT]["growth_bytes"]


def _peft_model(model: Model) -> Any:
    from _lora_models import with_adapter

    return with_adapter(model.build(), rank=16, dropout=0.0, fused=False)


def test_fused_training_without_dropout_has_the_losses_of_peft():
    losses = [
        _lora_training.run(options_of(arm=arm, tokens=16, dropout=0.0))["losses"]
        for arm in (PEFT, OURS)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_copy_of_the_base_is_seen():
    base = Model(**MODEL).build()
    one = live_base_bytes(base)
    vectors = sum(4 * p.numel() for p in base.parameters() if p.dim() == 1)
    assert one == base_bytes(base) - vectors
    second = copy.deepcopy(base)
    assert live_base_bytes(base) == 2 * one
    del second
    assert live_base_bytes(base) == one


@pytest.mark.parametrize(
    "arm", [_lora_jobs.ONE_BY_ONE, _lora_jobs.FUSED_ONE_BY_ONE, _lora_jobs.TOGETHER]
)
def test_jobs_of_every_arm_train_on_one_base(arm, monkeypatch):
    monkeypatch.setattr(_lora_jobs, "wait", lambda: None)
    options = options_of(arm=arm, first=0, jobs=2, rows=16, dropout=0.1)
    told = _lora_jobs.run(options)
    assert told["num_bases"] == 1
    assert [len(losses) for losses in told["losses"]] == [3, 3]
    assert told["seconds"][0] > 0 and told["growth_bytes"] > 0
    assert bool(told["facts"]) is (arm == _lora_jobs.TOGETHER)


def test_a_process_waits_when_it_is_warm(monkeypatch):
    monkeypatch.setattr(sys, "executable", find_python("libraries"))
    flags = ["--arm", _lora_jobs.PROCESSES, "--jobs", 1, "--rows", 8, "--dropout", 0, "--steps", 1]
    worker = lora.Worker("_lora_jobs.py", [*flags, "--threads", 1, *TINY])
    try:
        worker.wait_until_warm()
        worker.go_on()
        told = worker.result()
    finally:
        worker.close()
    assert told["num_bases"] == 1 and told["process_peak_bytes"] > told["base_bytes"]


def test_a_process_that_fails_says_why():
    worker = lora.Worker("_rows.py", [])  # ends without a line
    with pytest.raises(lora.WorkerError, match=r"_rows\.py: no output"):
        worker.wait_until_warm()
    worker.close()


class InProcess:
    """A worker without a process."""

    def __init__(self, script: str, flags: list[Any]) -> None:
        module = {"_lora_training.py": _lora_training, "_lora_jobs.py": _lora_jobs}[script]
        self.told = module.run(module.arguments(list(map(str, flags))))

    def wait_until_warm(self) -> None:
        """Nothing is to be waited for."""

    go_on = close = wait_until_warm

    def result(self) -> dict[str, Any]:
        return self.told


def test_parts_of_processes_end_in_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lora, "ROWS_OF_JOB", 8)
    monkeypatch.setattr(lora, "Worker", InProcess)
    monkeypatch.setattr(_lora_jobs, "wait", lambda: None)
    common = [*TINY, "--rounds", "2", "--steps", "1", "--threads", "1", "--dropouts", "0.1"]
    wanted = ["--arms", PEFT, OURS, _lora_jobs.PROCESSES, "--tokens", "16", "--jobs", "2"]
    lora.main([*common, *wanted, "--part", "training", "jobs", "bars", "--out", str(tmp_path)])
    (path,) = tmp_path.rglob("lora.json")
    rows = {row.arm: row for row in read_rows(path)}
    assert set(rows) == {PEFT, OURS, _lora_jobs.ONE_BY_ONE, _lora_jobs.PROCESSES}
    assert rows[OURS].limit_fraction == pytest.approx(rows[OURS].extra["growth_ratio"]["median"])
    assert all(row.num_repetitions == 2 for row in rows.values())
    processes, alone = rows[_lora_jobs.PROCESSES], rows[_lora_jobs.ONE_BY_ONE]
    assert (processes.extra["num_bases"], alone.extra["num_bases"]) == (2, 1)
    assert processes.extra["losses"] == alone.extra["losses"]  # the same jobs, in either arm
    assert "growth of a step over PEFT's, largest" in capsys.readouterr().out


# ------------------------------------------------------------------ bytes and packing


def test_counted_bytes_are_those_of_the_closed_form():
    pytest.importorskip("triton")
    script = REPOSITORY / "benchmarks" / "_lora_bytes.py"
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [find_python("interpreter"), str(script), "--quick"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path.rstrip(os.pathsep)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len({each["case"] for each in told}) == 4
    assert sum(each["arm"] == FORWARD for each in told) == 4
    for each in told:
        assert each["loaded"] + each["stored"] == each["closed"], each
        assert each["atomic"] == 0


def test_packing_is_held_against_its_bound():
    rows = {row.arm: row for row in packing_rows(WHERE, num_samples=800, repetitions=1)}
    samples = [length for batches in draw_jobs(800) for batch in batches for length in batch]
    for row in rows.values():
        assert row.extra["num_micro_batches"] >= row.extra["lower_bound"] >= sum(samples) / 2048
        assert row.limit is None  # the bar is for 100,000 samples
    assert set(rows) == {"first fit", "penstock"}


# ------------------------------------------------------------------------------ bars


def row(part: str, arm: str, *, limit: Limit | None = None, measured: float | None = None, **extra):
    case = f"{part}: {sorted((key, str(value)) for key, value in extra.items())}"
    peaks = {"saved": extra.pop("saved", 100)}
    extra = {"part": part, "most_saved_bytes": 100, **extra}
    return BenchmarkRow.of(
        [1.0],
        topic="lora",
        case=case,
        arm=arm,
        peak_bytes=peaks,
        limit=limit,
        measured=measured,
        extra=extra,
        **WHERE,
    )


def rows_with(factor: float) -> list[BenchmarkRow]:
    """Rows that meet every bar with a factor just below 1, and miss every one just above."""

    def layer(dropout: float, ratio: float) -> BenchmarkRow:
        ratios = {"median": ratio * factor}
        saved = round(100 * factor)
        return row(
            _lora_layers.LAYER, OURS, dropout=dropout, ratio_to_peft=ratios, saved=saved, n=ratio
        )

    closed = Limit(name="closed form", value=100.0, unit="B")
    seconds = Limit(name="5 s", value=1.0, unit="s")
    growth = [(512, 0.1, 0.70), (2048, 0.1, 0.70), (128, 0.0, 1.0)]
    return [
        *(layer(0.1, ratio) for ratio in (1.03, 0.86**2 / 1.03)),
        *(layer(0.0, ratio) for ratio in (1.03, 0.94**2 / 1.03)),
        row(_lora_layers.CROWDED, OURS, ratio_to_peft={"median": factor}),
        *(
            row("training", OURS, tokens=t, dropout=p, growth_ratio={"median": most * factor})
            for t, p, most in growth
        ),
        row(
            "jobs",
            _lora_jobs.TOGETHER,
            jobs=4,
            dropout=0.1,
            ratio={"median": 0.85 * factor},
            num_bases=1 if factor < 1 else 4,
        ),
        row("jobs", _lora_jobs.PROCESSES, jobs=4, dropout=0.1, num_bases=4),
        row("bytes", "down_product", limit=closed, measured=100 if factor < 1 else 99, atomic=0),
        row("bytes", FORWARD, limit=closed, measured=100 * factor, atomic=0),
        row("packing", "penstock", limit=seconds, measured=factor, over_bound=1.0),
    ]


@pytest.mark.parametrize(("factor", "is_met"), [(0.99, True), (1.01, False)])
def test_bars_are_met_or_not(factor, is_met):
    bars = list(_lora_bars.bars(rows_with(factor)))
    assert len(bars) == 13
    assert {bar.what: bar.is_met for bar in bars} == {bar.what: is_met for bar in bars}


def test_bars_without_rows_are_not_measured():
    bars = list(_lora_bars.bars([]))
    assert len(bars) == 13
    assert all(bar.is_met is None for bar in bars)


def test_a_dry_run_says_every_case(capsys):
    lora.main(["--dry-run", "--quick", "--part", "layers", "jobs"])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(said) == 2 * 1 * 3 * 2 * 5 + 2 * 2 * len(_lora_jobs.ARMS)
