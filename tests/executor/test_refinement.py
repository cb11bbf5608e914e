"""Steps of `fit` that are slower than planned are planned again, and the faster plan stays."""

import dataclasses
import functools
import gc
import logging
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from _planned import (
    CASES,
    MACHINE,
    differences,
    eagerly,
    everything,
    full_plan,
    plan_within,
    trainee,
)
from penstock.codegen import _cache
from penstock.executor.run import planning
from penstock.executor.run.planning import Refinement
from penstock.memory import FileStore, Link, Tier
from penstock.planner import Plan, as_measured, refine

pytestmark = pytest.mark.usefixtures("one_thread")
CASE, OPTIMIZER = "mixture", "adamw"
NUM_MEASURED = 6  # the first step, and five that are timed


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(_cache, "private_directory", lambda folder: tmp_path / "plans")


def fitted(model, stepper, **options):
    budget = full_plan(CASE, OPTIMIZER).peak_device_bytes * 3 // 4
    given = {"device_memory": budget, "machine": MACHINE, "time_limit": 0.3} | options
    return penstock.fit(model, stepper, CASES[CASE].batch, **given)


def below(tier, store):
    return {"store": store} if tier == "file" else {"host_memory": "1GiB"}


def open_files(store):
    """Nameless files of the store that this process has open."""
    paths = (Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd"))
    return sum(os.path.realpath(path).startswith(os.path.realpath(store)) for path in paths)


def taken_over_by(monkeypatch, choose):
    """Let `choose(plan, graph, report, held_bytes)` decide after the first steps, once."""

    def decide(self, plan, graph, report, held_bytes):
        self._decided.add(graph.digest)
        return choose(plan, graph, report, held_bytes)

    monkeypatch.setattr(Refinement, "decide", decide)


def with_other_times(plan: Plan, graph, report, held_bytes) -> Plan:
    """Another plan in the same memory, as its operators take unlike times."""
    times = [s and s * (1 + i % 7) for i, s in enumerate(report.operator_seconds)]
    report = dataclasses.replace(report, operator_seconds=tuple(times))
    budget = planning._budget_within(plan.budget, report.workspace_bytes, held_bytes)
    return refine(dataclasses.replace(plan, budget=budget, seed=9), report, graph, time_limit=0.05)


@pytest.mark.parametrize("tier", ["host", "file"])
def test_another_plan_takes_over_between_two_steps(tier, store, monkeypatch):
    taken_over_by(monkeypatch, with_other_times)
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    with fitted(model, stepper, debug=True, **below(tier, store)) as step:
        torch.manual_seed(1)
        losses = [step(CASES[CASE].batch) for _ in range(NUM_MEASURED + 4)]
        before, after = step.reports()
        found = everything(model, stepper, losses)
    assert (before.num_steps, after.num_steps) == (NUM_MEASURED, 4)
    assert (before.is_refined, after.is_refined) == (False, True)
    assert after.arena_bytes <= before.arena_bytes
    assert differences(eagerly(CASE, OPTIMIZER, NUM_MEASURED + 4), found, "") == []


@pytest.mark.parametrize("tier", ["host", "file"])
def test_what_is_too_small_is_replaced_and_given_back(tier, store, monkeypatch):
    """The new plan has half the arena, and keeps more below it."""

    def smaller(plan, graph, *_):
        return plan_within(graph, plan.budget.device_bytes // 2, tier)

    taken_over_by(monkeypatch, smaller)
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    num_files = open_files(store)
    with fitted(model, stepper, **below(tier, store)) as step:
        torch.manual_seed(1)
        losses = [step(CASES[CASE].batch) for _ in range(NUM_MEASURED)]
        num_bound = open_files(store)
        losses += [step(CASES[CASE].batch) for _ in range(3)]
        assert open_files(store) == num_bound
        before, after = step.reports()
        found = everything(model, stepper, losses)
    name = f"{tier}_bytes"
    assert getattr(after, name) > getattr(before, name)
    gc.collect()
    assert open_files(store) == num_files
    assert differences(eagerly(CASE, OPTIMIZER, NUM_MEASURED + 3), found, "") == []


def test_the_old_plan_stays_where_there_is_no_room_for_both(store, monkeypatch, caplog):
    def smaller(plan, graph, *_):
        return plan_within(graph, plan.budget.device_bytes // 2, "file")

    taken_over_by(monkeypatch, smaller)
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    with fitted(model, stepper, store=store) as step:
        step(CASES[CASE].batch)
        file_bytes = step.report().file_bytes
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    limited = FileStore(store, max_bytes=file_bytes * 5 // 4)
    with caplog.at_level(logging.INFO), fitted(model, stepper, store=limited) as step:
        torch.manual_seed(1)
        losses = [step(CASES[CASE].batch) for _ in range(NUM_MEASURED + 3)]
        (report,) = step.reports()
        found = everything(model, stepper, losses)
    assert report.num_steps == NUM_MEASURED + 3
    assert "going on with the plan as it was" in caplog.text
    assert differences(eagerly(CASE, OPTIMIZER, NUM_MEASURED + 3), found, "") == []


def test_a_model_without_memory_of_its_own_moves_too(store, monkeypatch):
    """It is never given back: there may be no room for it."""

    def half_of(plan, graph, *_):
        return plan_within(graph, plan.budget.device_bytes // 2, "file")

    taken_over_by(monkeypatch, half_of)
    num_files = open_files(store)
    losses = {}
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        stepper = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(3)
        for module in model if device == "cpu" else ():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        batch = torch.linspace(-1, 1, 32 * 64).reshape(32, 64)
        with penstock.fit(
            model,
            stepper,
            batch,
            loss=lambda output, batch: output.square().mean(),
            device_memory="320KiB",
            store=store,
            machine=MACHINE,
            time_limit=0.3,
        ) as step:
            losses[device] = [step(batch).item() for _ in range(NUM_MEASURED + 4)]
            assert len(step.reports()) == 2
    assert losses["meta"] == losses["cpu"]
    del model, stepper, step
    gc.collect()
    assert open_files(store) == num_files


@functools.cache
def ran():
    """A report, and the plan with the graph that it is of."""
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    with fitted(model, stepper, host_memory="1GiB") as step:
        for _ in range(2):
            step(CASES[CASE].batch)
        return step.report(), *step._planned[0]


class Reported:
    """A refinement, and reports for it that say what a test wants."""

    def __init__(self):
        self.kept = []
        self.refinement = Refinement(0.5, lambda graph, plan: self.kept.append(plan))
        self.report, self.plan, self.graph = ran()

    def decide(self, plan, *, step_seconds, operators=1.0, links=1.0):
        """Decide about a plan whose steps take so long, by measured times of such shares."""
        own = [s * operators for s in plan.operator_seconds]
        rates = {link.value: p.bytes_per_second * links for link, p in plan.machine.links.items()}
        report = dataclasses.replace(
            self.report,
            step_seconds=step_seconds,
            operator_seconds=tuple(own),
            bytes_per_second={link: rates[link] for link in self.report.bytes_per_second},
        )
        held = {Tier.DEVICE: plan.arena_bytes, Tier.HOST: 2**20}
        return self.refinement.decide(plan, self.graph, report, held)


def test_steps_as_planned_are_left_alone():
    said = Reported()
    assert said.decide(said.plan, step_seconds=1.2 * said.plan.step_seconds) is said.plan
    assert said.refinement.is_decided(said.graph)


def test_operators_that_are_slower_than_thought_are_not_planned_again():
    """No plan is faster if nothing waits and nothing runs twice."""
    said = Reported()
    slower = 1e4 * said.plan.step_seconds
    assert said.decide(said.plan, step_seconds=slower, operators=1e4) is said.plan
    assert said.refinement.is_decided(said.graph)


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_faster_of_both_plans_stays(is_faster, caplog):
    said = Reported()
    old = as_measured(said.plan, _with_links(said, 1e-3), said.graph)
    found = said.decide(said.plan, step_seconds=old.step_seconds, links=1e-3)
    assert found is not said.plan
    assert found.step_seconds < 0.95 * old.step_seconds
    assert found.peak_device_bytes <= said.plan.arena_bytes + said.report.workspace_bytes
    assert not said.refinement.is_decided(said.graph)
    took = old.step_seconds * (0.9 if is_faster else 1.1)
    with caplog.at_level(logging.INFO):
        assert said.decide(found, step_seconds=took) is (found if is_faster else said.plan)
    assert said.refinement.is_decided(said.graph)
    assert said.kept == ([found] if is_faster else [])


def _with_links(said, share):
    links = said.plan.machine.links
    rates = {name: links[Link(name)].bytes_per_second * share for name in said.report.moved_bytes}
    return dataclasses.replace(
        said.report, operator_seconds=said.plan.operator_seconds, bytes_per_second=rates
    )


def test_a_plan_that_proved_faster_is_the_one_of_the_next_process(monkeypatch):
    monkeypatch.setattr(planning, "_MIN_SLOWDOWN", 0.0)
    monkeypatch.setattr(Refinement, "_find_better", lambda _, *given: with_other_times(*given))
    chosen = []
    for _ in range(2):
        model, stepper = trainee(CASES[CASE], OPTIMIZER)
        with fitted(model, stepper, host_memory="1GiB") as step:
            for _ in range(2 * NUM_MEASURED + 1):
                step(CASES[CASE].batch)
            chosen.append([each.is_refined for each in step.reports()])
    stayed = len(chosen[0]) == 2
    assert chosen[0] == ([False, True] if stayed else [False, True, False])
    assert chosen[1][0] is stayed


def test_ctrl_c_ends_planning_and_is_heard(monkeypatch):
    def interrupted(plan, *_):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            torch.manual_seed(0)
        except KeyboardInterrupt:
            return plan  # as the planner does with the best that it has
        return plan

    taken_over_by(monkeypatch, interrupted)
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    with fitted(model, stepper, host_memory="1GiB") as step:
        torch.manual_seed(1)
        losses = [step(CASES[CASE].batch) for _ in range(NUM_MEASURED)]
        with pytest.raises(KeyboardInterrupt):
            step(CASES[CASE].batch)
        losses.append(step(CASES[CASE].batch))
        found = everything(model, stepper, losses)
    assert differences(eagerly(CASE, OPTIMIZER, NUM_MEASURED + 1), found, "") == []
