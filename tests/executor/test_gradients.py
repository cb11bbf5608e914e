"""Work between backward and update, and backward passes that share an update."""

import pytest
import torch
from torch import nn

import penstock
from _planned import CASES, MACHINE, differences, everything, plan_share, trainee
from penstock.errors import CaptureError, NonFiniteLossError
from penstock.executor import bind
from penstock.graph import capture
from penstock.graph.capturing.step_program import call_model, loss_of
from penstock.planner import plan

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIMIZER = "adamw"


def clipping(model, norm):
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), norm)


def eager_losses(case, model, stepper, batches, before_step, accumulate):
    losses = []
    for batch in batches:
        stepper.zero_grad()
        total = None
        for part in batch if accumulate else [batch]:
            loss = loss_of(call_model(model, part), part, case.loss)
            if accumulate:
                loss = loss / accumulate
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        if before_step is not None:
            before_step()
        stepper.step()
        losses.append(total)
    return losses


def planned_losses(case, model, stepper, batches, store, **how):
    graph = capture(model, stepper, batches[0], loss=case.loss, **how)
    found = plan_share(graph, 1 / 2, "file")
    with bind(found, model, stepper, graph=graph, loss=case.loss, store=store, debug=True) as step:
        return [step(batch) for batch in batches]


# Of each kind of step with the small model; with the other one each norm and number once.
@pytest.mark.parametrize(
    ("name", "norm", "accumulate"),
    [("mixture", norm, accumulate) for norm in (None, 0.1, 1e6) for accumulate in (None, 2)]
    + [("gpt2", None, 2), ("gpt2", 0.1, 2), ("gpt2", 1e6, None)],
)
def test_clipped_and_accumulated_gradients_are_eagers(name, norm, accumulate, store):
    case = CASES[name]
    batch = case.batch
    batches = [[batch] * accumulate if accumulate else batch] * 3
    ends = []
    for planned in (False, True):
        model, stepper = trainee(case, OPTIMIZER)
        before_step = None if norm is None else clipping(model, norm)
        torch.manual_seed(1)
        if planned:
            how = {"before_step": before_step, "accumulate": accumulate}
            losses = planned_losses(case, model, stepper, batches, store, **how)
        else:
            losses = eager_losses(case, model, stepper, batches, before_step, accumulate)
        ends.append(everything(model, stepper, losses))
    assert differences(*ends, "") == []


def test_clipping_changes_the_training():
    """Without an effect of clipping the test above would compare nothing."""
    case = CASES["mixture"]
    ends = []
    for norm in (0.01, 1e6):
        model, stepper = trainee(case, "sgd")
        losses = eager_losses(case, model, stepper, [case.batch], clipping(model, norm), None)
        ends.append(everything(model, stepper, losses))
    assert differences(*ends, "") != []


def test_micro_batches_are_different_ones(store):
    """Of a list of micro-batches each one counts, in its place."""
    model = nn.Linear(4, 1)
    case = CASES["mixture"]._replace(loss=lambda output, batch: output.square().mean())
    batches = [[torch.randn(3, 4), torch.randn(3, 4)] for _ in range(3)]
    ends = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        if planned:
            losses = planned_losses(case, model, stepper, batches, store, accumulate=2)
        else:
            losses = eager_losses(case, model, stepper, batches, None, 2)
        ends.append(everything(model, stepper, losses))
    assert differences(*ends, "") == []


def test_fit_clips_and_accumulates(store):
    case = CASES["mixture"]
    ends = []
    batch = [case.batch] * 2
    for planned in (False, True):
        model, stepper = trainee(case, OPTIMIZER)
        before_step = clipping(model, 0.1)
        if planned:
            step = penstock.fit(
                *(model, stepper, batch),
                **{"device_memory": "1MiB", "store": store, "machine": MACHINE},
                **{"time_limit": 0.05, "cache": False},
                **{"before_step": before_step, "accumulate": 2},
            )
            torch.manual_seed(1)
            with step:
                losses = [step(batch) for _ in range(3)]
        else:
            torch.manual_seed(1)
            losses = eager_losses(case, model, stepper, [batch] * 3, before_step, 2)
        ends.append(everything(model, stepper, losses))
    assert differences(*ends, "") == []


def test_the_first_batch_is_captured_as_it_will_be_run():
    case = CASES["mixture"]
    model, stepper = trainee(case, OPTIMIZER)
    how = {"before_step": clipping(model, 0.1), "accumulate": 2}
    batch = [case.batch] * 2
    graph = capture(model, stepper, batch, **how)
    found = plan(graph, machine=MACHINE, time_limit=0.05)
    with bind(found, model, stepper, **how) as step:
        assert step(batch).isfinite()


def test_gradients_that_are_not_the_models_are_noticed():
    case = CASES["mixture"]
    model, stepper = trainee(case, OPTIMIZER)
    parameters = list(model.parameters())
    with pytest.raises(CaptureError, match=r"model\.parameters\(\)"):
        capture(
            model,
            stepper,
            case.batch,
            before_step=lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        )


@pytest.mark.parametrize("batch", [[0], 3, [0, 1, 2]])
def test_as_many_micro_batches_as_said(batch):
    case = CASES["mixture"]
    model, stepper = trainee(case, OPTIMIZER)
    with pytest.raises(ValueError, match="accumulate=2"):
        capture(model, stepper, batch, accumulate=2)


def test_a_loss_that_is_not_finite_is_undone_with_clipping_too(store):
    """A gradient norm of NaN has not reached the parameters when the loss is known."""
    model = nn.Linear(4, 1)
    stepper = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.ones(3, 4)
    how = {"before_step": clipping(model, 1.0)}
    loss = lambda output, batch: output.sum()  # noqa: E731
    graph = capture(model, stepper, batch, loss=loss, **how)
    found = plan(graph, machine=MACHINE, time_limit=0.05)
    with bind(found, model, stepper, graph=graph, loss=loss) as step:
        step(batch)
        before = everything(model, stepper, [])
        with pytest.raises(NonFiniteLossError):
            step(batch * torch.nan)
        assert differences(before, everything(model, stepper, []), "") == []


def signs(model):
    for parameter in model.parameters():
        parameter.grad = parameter.grad.sign() * 0.1


def first_alone(model):
    for parameter in list(model.parameters())[1:]:
        parameter.grad = None


@pytest.mark.parametrize("change", [signs, first_alone])
def test_before_step_may_replace_gradients(change, store):
    case, batches = CASES["mixture"], [CASES["mixture"].batch] * 3
    ends = []
    for losses_of in (eager_losses, planned_losses):
        model, stepper = trainee(case, "sgd")
        how = {"before_step": lambda model=model: change(model), "accumulate": None}
        arguments = (batches, *([store] if losses_of is planned_losses else []))
        torch.manual_seed(1)
        losses = losses_of(case, model, stepper, *arguments, **how)
        ends.append(everything(model, stepper, losses))
    assert differences(*ends, "") == []


def test_before_step_without_gradients_is_refused():
    model, stepper = trainee(CASES["mixture"], "sgd")

    def shrink():
        with torch.no_grad():
            next(model.parameters()).mul_(0.9)

    with pytest.raises(CaptureError, match=r"neither looked at a gradient.*between steps"):
        capture(
            model, stepper, CASES["mixture"].batch, loss=CASES["mixture"].loss, before_step=shrink
        )


def test_batches_of_a_step_that_was_captured_with_an_expanded_one():
    model, stepper = trainee(CASES["mixture"], "sgd")
    arguments = {"loss": lambda output, _: output.square().mean(), "machine": MACHINE}
    first = torch.randn(1, 8).expand(6, 8)
    with penstock.fit(
        model, stepper, first, device_memory="1MiB", time_limit=0.1, cache=False, **arguments
    ) as step:
        for batch in (first, torch.randn(1, 8).expand(6, 8), torch.randn(1, 8).repeat(6, 1)):
            expected = model(batch).square().mean()
            assert torch.equal(step(batch), expected.detach())
        zero = torch.zeros(6, 8)
        zero[2, 3] = float("nan")  # not the zero of the other rows
        for batch in (torch.randn(6, 8), torch.randn(6, 1).expand(6, 8), zero):
            with pytest.raises(ValueError, match=r"batch was captured with .*share memory"):
                step(batch)
