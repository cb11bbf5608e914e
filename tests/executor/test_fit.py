"""From a model to a step within a budget in one call; plans are made once."""

import pytest
import torch

import penstock
from _planned import CASES, MACHINE, differences, eagerly, everything, full_plan, trainee
from penstock.codegen import _cache
from penstock.executor.run import planning

pytestmark = pytest.mark.usefixtures("one_thread")
CASE, OPTIMIZER = "mixture", "adamw"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(_cache, "private_directory", lambda folder: tmp_path)  # of plans only


def fitted(model, stepper, **options):
    budget = full_plan(CASE, OPTIMIZER).peak_device_bytes * 3 // 4
    given = {"device_memory": budget, "machine": MACHINE, "time_limit": 0.3} | options
    return penstock.fit(model, stepper, CASES[CASE].batch, **given)


@pytest.mark.parametrize("tiers", [("host",), ("file",), ("host", "file")])
def test_training_in_less_memory_is_ordinary_training(tiers, store):
    options = {}
    if "host" in tiers:
        options["host_memory"] = "1GiB" if len(tiers) == 1 else "4KiB"
    if "file" in tiers:
        options["store"] = store
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    with fitted(model, stepper, debug=True, **options) as step:
        torch.manual_seed(1)
        losses = [step(CASES[CASE].batch) for _ in range(3)]
        found = everything(model, stepper, losses)
        report = step.report()
        assert report.num_steps == 3
        assert report.arena_bytes + report.workspace_bytes <= (step.plan.budget.device_bytes or 0)
        assert bool(report.file_bytes) == ("file" in tiers)
        assert "stall" in str(report)
    assert differences(eagerly(CASE, OPTIMIZER, 3), found, "") == []


@pytest.mark.usefixtures("quick_probe")
def test_operators_are_measured_on_this_machine(store):
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    with fitted(model, stepper, machine=None, store=store) as step:
        assert step.plan.machine.device == "cpu"
        assert step(CASES[CASE].batch).isfinite()


def test_the_same_step_is_planned_once(store, monkeypatch):
    made = []

    def counted(*args, **kwargs):
        made.append(penstock.plan(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(planning, "plan", counted)
    for options in ({}, {}, {"seed": 1}, {"cache": False}, {"machine": "h200"}):
        model, stepper = trainee(CASES[CASE], OPTIMIZER)
        with fitted(model, stepper, host_memory="1GiB", **options) as step:
            assert step(CASES[CASE].batch).isfinite()
    assert len(made) == 4


def test_a_damaged_plan_is_made_again(tmp_path, caplog):
    for _ in range(2):
        model, stepper = trainee(CASES[CASE], OPTIMIZER)
        with fitted(model, stepper, host_memory="1GiB") as step:
            assert step(CASES[CASE].batch).isfinite()
        (path,) = tmp_path.rglob("plan.json")
        path.write_text(path.read_text()[:-100])
    assert "made anew" in caplog.text


def test_a_budget_that_is_too_small_says_what_would_do():
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    with pytest.raises(penstock.InfeasibleError) as caught:
        fitted(model, stepper, device_memory=1024, host_memory="1GiB")
    enough = caught.value.minimum_device_bytes
    with fitted(model, stepper, device_memory=enough, host_memory="1GiB") as step:
        assert step(CASES[CASE].batch).isfinite()
