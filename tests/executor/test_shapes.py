"""Batches of several shapes: a plan for each, one memory for all, one state."""

import copy
import functools

import pytest
import torch
from torch import nn

import penstock
from _planned import (
    CASES,
    MACHINE,
    differences,
    eager_step,
    everything,
    plan_within,
    trainee,
)
from penstock.errors import StoreReadError
from penstock.executor import bind
from penstock.graph import capture
from penstock.memory import Tier, _transfers
from penstock.planner import plan

pytestmark = pytest.mark.usefixtures("one_thread")
CASE, OPTIMIZER = "mixture", "adamw"
TURNS = [0, 1, 1, 0, 2, 0, 2, 1, 2]


def batches_of(case):
    return [case.batch, case.batch[:6], case.batch[:3]]


@functools.cache
def whole_plan(number):
    """The plan and the graph of a batch, of another model of the same kind."""
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    graph = capture(model, stepper, batches_of(CASES[CASE])[number])
    return plan(graph, machine=MACHINE, time_limit=0.05), graph


@functools.cache
def planned_shape(number, tier, share):
    found, graph = whole_plan(number)
    if share < 1:
        found = plan_within(graph, int(found.peak_device_bytes * share), tier)
    return found, graph


def planned_shapes(tier, shares):
    return [planned_shape(number, tier, share) for number, share in enumerate(shares)]


def bound_shapes(model, stepper, tier, shares, store):
    (first, graph), *others = planned_shapes(tier, shares)
    return bind(first, model, stepper, graph=graph, extra_plans=others, store=store, debug=True)


@functools.cache
def eagerly():
    """Results of ordinary training, for comparisons only."""
    case = CASES[CASE]
    model, stepper = trainee(case, OPTIMIZER)
    losses = [
        eager_step(model, stepper, case._replace(batch=batches_of(case)[turn])) for turn in TURNS
    ]
    return everything(model, stepper, losses)


@pytest.mark.parametrize(
    ("shares", "tier"),
    [
        ((1, 1, 1), "host"),  # of which nothing lies below the device
        *(((0.5, 0.5, 0.5), tier) for tier in ("host", "file")),
        *(((1, 0.5, 0.7), tier) for tier in ("host", "file")),
    ],
)
def test_plans_that_take_turns_train_as_eager_does(tier, shares, store):
    case = CASES[CASE]
    model, stepper = trainee(case, OPTIMIZER)
    with bound_shapes(model, stepper, tier, shares, store) as step:
        losses = [step(batches_of(case)[turn]) for turn in TURNS]
        found = everything(model, stepper, losses)
    assert differences(eagerly(), found, "") == []
    assert differences(found, everything(model, stepper, losses), "closed") == []


def test_one_memory_as_large_as_the_largest_wants(store):
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    pairs = planned_shapes("host", (1, 0.5, 0.5))
    (first, graph), *others = pairs
    with bind(first, model, stepper, graph=graph, extra_plans=others) as step:
        arenas = {execution.memory.arena.tensor.data_ptr() for execution in step._executions}
        assert len(arenas) == 1
        arena = step._executions[0].memory.arena
        assert arena.num_bytes == max(each.arena_bytes for each, _ in pairs)


def test_what_lies_below_the_device_stays_where_it_is(store):
    case = CASES[CASE]
    model, stepper = trainee(case, OPTIMIZER)
    with bound_shapes(model, stepper, "host", (0.5, 0.5, 0.5), store) as step:

        def addresses():
            block = step._executions[0].memory.block_of(Tier.HOST)
            begin, end = block.tensor.data_ptr(), block.tensor.data_ptr() + block.num_bytes
            tensors = dict(model.named_parameters())
            for index, state in enumerate(stepper.state.values()):
                tensors |= {f"{index}.{key}": value for key, value in state.items()}
            found = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            return {name: at for name, at in found.items() if begin <= at < end}

        step(batches_of(case)[0])
        there = addresses()
        step(batches_of(case)[1])
        shared = there.keys() & addresses().keys()
        assert len(shared) >= 4
        assert [n for n in shared if addresses()[n] != there[n]] == []


def test_a_shape_that_no_plan_is_for_is_refused(store):
    case = CASES[CASE]
    model, stepper = trainee(case, OPTIMIZER)
    with bound_shapes(model, stepper, "host", (1, 1, 1), store) as step:
        step(case.batch[:6])
        before = everything(model, stepper, [])
        with pytest.raises(ValueError, match="was captured as"):
            step(case.batch[:5])
        assert differences(before, everything(model, stepper, []), "") == []


def test_a_step_that_fails_after_a_turn_is_undone(store, monkeypatch):
    case = CASES[CASE]
    model, stepper = trainee(case, OPTIMIZER)
    with bound_shapes(model, stepper, "file", (0.5, 0.5, 0.5), store) as step:
        losses = [step(batches_of(case)[turn]) for turn in TURNS[:3]]

        def fails(fd, buffers, offset):
            raise OSError(5, "no")

        with monkeypatch.context() as patch:
            patch.setattr(_transfers, "_preadv", fails)
            with pytest.raises(StoreReadError):
                step(batches_of(case)[TURNS[3]])
        losses += [step(batches_of(case)[turn]) for turn in TURNS[3:]]
        assert differences(eagerly(), everything(model, stepper, losses), "") == []


def test_fit_plans_for_each_shape(store):
    case = CASES[CASE]
    model, stepper = trainee(case, OPTIMIZER)
    first, *others = batches_of(case)
    step = penstock.fit(
        *(model, stepper, first),
        extra_batches=others,
        device_memory="64KiB",
        store=store,
        machine=MACHINE,
        time_limit=0.05,
        cache=False,
    )
    with step:
        losses = [step(batches_of(case)[turn]) for turn in TURNS]
        assert differences(eagerly(), everything(model, stepper, losses), "") == []


def test_several_plans_need_their_graphs(store):
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    (first, _), *others = planned_shapes("host", (1, 1, 1))
    with pytest.raises(ValueError, match="graph="):
        bind(first, model, stepper, extra_plans=others)


def test_a_step_of_the_smallest_tensors(store):
    """All storages are below a kilobyte, and operators still find them at multiples of 64."""
    ends = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
        stepper = torch.optim.AdamW(model.parameters(), lr=0.1)
        batch = torch.ones(2, 3)
        case = CASES[CASE]._replace(batch=batch, loss=lambda output, batch: output.square().sum())
        if planned:
            graph = capture(model, stepper, batch, loss=case.loss)
            full = plan(graph, machine=MACHINE, time_limit=0.05)
            found = plan_within(graph, full.peak_device_bytes // 2, "host")
            assert found.transfers
            with bind(found, model, stepper, graph=graph, loss=case.loss, debug=True) as step:
                losses = [step(batch) for _ in range(3)]
        else:
            losses = [eager_step(model, stepper, case) for _ in range(3)]
        ends.append(everything(model, stepper, losses))
    assert differences(*ends, "") == []


def test_forms_that_come_later_are_added_and_memory_is_lent_in_between():
    case = CASES[CASE]
    expected = eagerly()
    model, stepper = trainee(case, OPTIMIZER)
    batches = batches_of(case)
    step = penstock.fit(
        model,
        stepper,
        batches[0],
        device_memory="1GiB",
        machine=MACHINE,
        time_limit=0.05,
        cache=False,
        debug=True,
    )
    known, losses = {0}, []
    for number, turn in enumerate(TURNS):
        if turn not in known:
            step.add(batches[turn])
            known.add(turn)
        if number == 5:
            step.release()
            for parameter in model.parameters():  # nothing is left of the arena
                assert parameter.untyped_storage().nbytes() <= parameter.nbytes + 63
        losses.append(step(batches[turn]))
    reports = step.reports()
    assert sum(report.num_steps for report in reports) == len(TURNS)
    step.close()
    assert sorted(each.num_steps for each in step.reports()) == sorted(
        each.num_steps for each in reports
    )
    assert step.report() in step.reports()
    assert differences(everything(model, stepper, losses), expected, "") == []
    with pytest.raises(penstock.errors.PenstockError, match="open step"):
        step.add(batches[0])


def test_another_number_of_micro_batches_has_a_plan_of_its_own():
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))]
    models.append(copy.deepcopy(models[0]))
    steppers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in models]
    with penstock.fit(
        models[1],
        steppers[1],
        [batch] * 3,
        extra_batches=[[batch] * 2],
        accumulate=3,
        loss=lambda output, _: output.square().mean(),
        device_memory="1GiB",
        machine=MACHINE,
        time_limit=0.05,
        cache=False,
    ) as step:
        for update in ([batch, batch * 2, batch * 3], [batch * 2, batch], [batch] * 3):
            steppers[0].zero_grad()
            for part in update:
                (models[0](part).square().mean() / len(update)).backward()
            steppers[0].step()
            step(update)
        for planned, eager in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert torch.equal(planned, eager)


def images(num, memory_format):
    generator = torch.Generator().manual_seed(num)
    made = torch.randn(4, 3, 12, 12, generator=generator)
    return made.to(memory_format=memory_format)


def convolutional():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(512, 1)
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_another_order_of_dimensions_in_memory_is_another_form():
    formats = [torch.contiguous_format, torch.channels_last] * 3
    batches = [(images(num, each),) for num, each in enumerate(formats)]
    loss = lambda output, batch: output.square().mean()  # noqa: E731
    model, optimizer = convolutional()
    options = {"device_memory": "64MiB", "machine": "v100-16gb-pcie3", "time_limit": 0.1}
    step = penstock.fit(model, optimizer, batches[0], loss=loss, **options)
    with pytest.raises(ValueError, match="in another order in memory"):
        step(batches[1])
    step.add(batches[1])
    losses = [step(batch) for batch in batches]
    plain, stepper = convolutional()
    for batch, found in zip(batches, losses, strict=True):
        stepper.zero_grad()
        expected = loss(plain(*batch), batch)
        expected.backward()
        stepper.step()
        assert torch.equal(expected.detach(), found)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_part_of_a_larger_batch_is_of_the_same_form():
    model, optimizer = convolutional()
    loss = lambda output, batch: output.square().mean()  # noqa: E731
    options = {"device_memory": "64MiB", "machine": "v100-16gb-pcie3", "time_limit": 0.1}
    large = torch.randn(4, 3, 12, 16)
    step = penstock.fit(model, optimizer, (large[..., :12].clone(),), loss=loss, **options)
    first = step((large[..., :12],))
    assert torch.isfinite(first)
