"""Plans, graphs and models that do not fit together are refused before anything moves."""

import dataclasses

import pytest
import torch

import penstock
from _planned import (
    CASES,
    MACHINE,
    bind,
    bound,
    differences,
    everything,
    graph_of,
    plan_of,
    trainee,
)
from penstock.errors import GraphFileError, PlanError

pytestmark = pytest.mark.usefixtures("one_thread")
CASE, OPTIMIZER = "mixture", "sgd"


def bindable(**changes):
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    given = {
        "plan": plan_of(CASE, OPTIMIZER, 1 / 3, "host"),
        "model": model,
        "optimizer": stepper,
        "graph": graph_of(CASE, OPTIMIZER),
    }
    return given | changes


def refused(error, match, **changes):
    """Binding raises, and leaves the model's tensors and the optimizer's state alone."""
    given = bindable(**changes)
    model, stepper = given.pop("model"), given.pop("optimizer")
    addresses = [tensor.data_ptr() for tensor in model.parameters()]
    with pytest.raises(error, match=match):
        bind(given.pop("plan"), model, stepper, **given)
    assert [tensor.data_ptr() for tensor in model.parameters()] == addresses
    assert not stepper.state


def test_a_plan_for_another_graph():
    refused(PlanError, "for the graph", graph=graph_of("lstm", "sgd"))


def test_a_wrong_plan():
    plan = plan_of(CASE, OPTIMIZER, 1 / 3, "host")
    wrong = dataclasses.replace(plan, transfers=plan.transfers[1:])
    refused(PlanError, "boundary", plan=wrong)


def test_addresses_between_two_elements():
    plan = plan_of(CASE, OPTIMIZER, 1, "host")
    moved = tuple(p._replace(offset=p.offset + 2) for p in plan.placements)
    refused(PlanError, "multiples of 64", plan=dataclasses.replace(plan, placements=moved))


def test_another_model():
    model = torch.nn.Linear(3, 3)
    stepper = torch.optim.SGD(model.parameters())
    refused(GraphFileError, "another model", model=model, optimizer=stepper)


def test_a_model_of_other_widths():
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    model.gate.weight = torch.nn.Parameter(torch.zeros(5, 8))
    refused(GraphFileError, "model.gate.weight", model=model, optimizer=stepper)


def test_tied_weights_in_one_of_the_two():
    model, stepper = trainee(CASES["gpt2"], OPTIMIZER)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    changes = {"plan": plan_of("gpt2", OPTIMIZER, 1, "host"), "graph": graph_of("gpt2", OPTIMIZER)}
    refused(GraphFileError, "tied weights", model=model, optimizer=stepper, **changes)


def test_a_file_without_a_store():
    refused(ValueError, "store=None", plan=plan_of(CASE, OPTIMIZER, 1 / 3, "file"))


@pytest.mark.parametrize("name", ["plan", "model", "optimizer"])
def test_arguments_of_other_types(name):
    given = bindable(**{name: 3})
    with pytest.raises(TypeError, match=name):
        bind(given["plan"], given["model"], given["optimizer"])


def test_the_first_batch_proves_that_the_plan_is_for_this_step():
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    plan = plan_of(CASE, OPTIMIZER, 1 / 3, "host")
    with bind(plan, model, stepper) as step:
        with pytest.raises(penstock.PenstockError, match="nothing to report"):
            step.report()
        with pytest.raises(PlanError, match="for the graph"):
            step(CASES[CASE].batch[:5])
        assert step(CASES[CASE].batch).isfinite()


def test_a_batch_of_another_shape_changes_nothing(store):
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    options = {"share": 1 / 3, "tier": "host", "store": store}
    with bound(CASE, OPTIMIZER, model, stepper, **options) as step:
        step(CASES[CASE].batch)
        before = everything(model, stepper, [])
        with pytest.raises(ValueError, match="was captured as"):
            step(CASES[CASE].batch[:5])
        with pytest.raises(ValueError, match="batch is on the meta device"):
            step(CASES[CASE].batch.to("meta"))
        with pytest.raises(ValueError, match=r"batch is of layout torch\.sparse_coo"):
            step(CASES[CASE].batch.to_sparse())
        assert differences(before, everything(model, stepper, []), "") == []
        assert step(CASES[CASE].batch).isfinite()
    with pytest.raises(penstock.PenstockError, match="closed"):
        step(CASES[CASE].batch)


@pytest.mark.parametrize("accumulate", [None, 1, 2])
def test_a_list_for_a_tuple_with_which_the_model_is_called_otherwise(accumulate):
    """As the default collation of a `DataLoader` makes a list of a pair."""
    model = torch.nn.Bilinear(4, 4, 1)
    stepper = torch.optim.SGD(model.parameters())
    pair = torch.ones(3, 4), torch.ones(3, 4)
    batch, other = pair, [*pair]
    if accumulate is not None:
        batch, other = [pair] * accumulate, (*[pair] * (accumulate - 1), [*pair])
    graph = penstock.capture(
        model, stepper, batch, loss=lambda output, _: output.mean(), accumulate=accumulate
    )
    with bind(penstock.plan(graph, machine=MACHINE), model, stepper, graph=graph) as step:
        with pytest.raises(
            ValueError, match=r"is passed as model\(batch\), .* pass tuple\(batch\)"
        ):
            step(other)
        step(batch)
        step(tuple(batch))


def test_a_constant_of_the_graph_that_has_changed(store):
    model, stepper = trainee(CASES[CASE], OPTIMIZER)
    options = {"share": 1 / 3, "tier": "host", "store": store}
    with bound(CASE, OPTIMIZER, model, stepper, **options) as step:
        stepper.param_groups[0]["nesterov"] = True
        with pytest.raises(GraphFileError, match="nesterov"):
            step(CASES[CASE].batch)


def test_a_graph_that_does_not_count_its_workspace():
    graph = graph_of(CASE, OPTIMIZER)
    marks = {"workspace_holds_results"}  # files of older versions lack it
    metadata = {key: item for key, item in graph.metadata.items() if key not in marks}
    old = dataclasses.replace(graph, metadata=metadata)
    refused(GraphFileError, "capture the step again", graph=old)
