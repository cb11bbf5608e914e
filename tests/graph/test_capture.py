"""A captured training step does what eager does, bit for bit, and leaves no trace."""

import copy
import dataclasses

import pytest
import torch

import _traps
from _steps import differences, eager_step, unlike_eager
from _zoo import CASES, Mixture
from penstock.graph import Kind, Operator, Phase, StepGraph, TensorView, capture

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}
OTHER_OPTIMIZERS = {
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "nesterov": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=True),
    "foreach sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9, foreach=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, weight_decay=0.1, amsgrad=True),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "foreach adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr_decay=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9),
    "nadam": lambda parameters: torch.optim.NAdam(parameters),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_eagers_bit_for_bit(case, optimizer):
    assert unlike_eager(CASES[case], OPTIMIZERS[optimizer]) == []


@pytest.mark.parametrize("optimizer", OTHER_OPTIMIZERS)
@pytest.mark.parametrize("case", ["lstm", "mixture"])
def test_every_optimizer_is_eagers_bit_for_bit(case, optimizer):
    assert unlike_eager(CASES[case], OTHER_OPTIMIZERS[optimizer]) == []


@pytest.mark.parametrize("case", _traps.CASES)
def test_traps(case):
    assert unlike_eager(_traps.CASES[case], OPTIMIZERS["adamw"]) == []


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "fused adamw", "foreach adamw"])
def test_state_that_exists_is_taken_up(optimizer):
    make = (OPTIMIZERS | OTHER_OPTIMIZERS)[optimizer]
    assert unlike_eager(CASES["mixture"], make, warm_up_steps=2) == []


def test_dampening_needs_a_first_step():
    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)

    with pytest.raises(ValueError, match="take one ordinary step"):
        unlike_eager(CASES["mixture"], make)
    assert unlike_eager(CASES["mixture"], make, warm_up_steps=1) == []


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "fused adamw", "foreach adamw"])
def test_schedules_stay_live(optimizer):
    def schedule(optimizer, step):
        group = optimizer.param_groups[0]
        group["lr"] /= step + 2
        for key in ("momentum", "weight_decay"):
            if group.get(key):
                group[key] *= 0.5
        if "betas" in group:
            group["betas"] = (0.8 - 0.1 * step, 0.9)

    make = (OPTIMIZERS | OTHER_OPTIMIZERS)[optimizer]
    assert unlike_eager(CASES["mixture"], make, before_step=schedule) == []


def test_a_scheduler_of_torch_may_hold_the_optimizer():
    schedulers = {}

    def make(parameters):
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        schedulers[optimizer] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer

    def before_step(optimizer, step):
        optimizer._opt_called = True  # the graph does not go through optimizer.step()
        schedulers[optimizer].step()

    assert unlike_eager(CASES["mixture"], make, before_step=before_step) == []


def test_nothing_is_touched():
    case = _traps.CASES["aliases"]
    model = case.make()
    optimizer = torch.optim.AdamW(model.parameters())
    eager_step(model, optimizer, case)
    gradients = [parameter.grad for parameter in model.parameters()]
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    before = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    random_state = torch.get_rng_state()
    capture(model, optimizer, case.batch)
    assert differences(before, (dict(model.state_dict()), optimizer.state_dict()), "") == []
    assert torch.equal(random_state, torch.get_rng_state())
    assert [id(parameter.grad) for parameter in model.parameters()] == list(map(id, gradients))
    for name, module in model.named_modules():
        assert module.__dict__.keys() == attributes[name].keys()
        assert all(module.__dict__[key] is value for key, value in attributes[name].items())


def test_a_failed_capture_touches_nothing_either():
    model = Mixture()
    parameters = list(model.parameters())
    with pytest.raises(TypeError, match="one element"):
        capture(model, torch.optim.SGD(parameters), CASES["mixture"].batch, loss=lambda *_: 1)
    assert [id(each) for each in model.parameters()] == list(map(id, parameters))


def test_a_model_without_memory_is_captured():
    with torch.device("meta"):
        model = CASES["gpt2"].make()
        optimizer = torch.optim.AdamW(model.parameters())
    graph = capture(model, optimizer, CASES["gpt2"].batch)
    kinds = {storage.kind for storage in graph.storages}
    assert kinds == set(Kind) - {Kind.BUFFER}
    assert {operator.phase for operator in graph.operators} == set(Phase)
    parameters = [storage for storage in graph.storages if storage.kind is Kind.PARAMETER]
    assert sum(storage.num_bytes for storage in parameters) == 4 * sum(
        parameter.numel() for parameter in model.parameters()
    )
    gradients = [storage for storage in graph.storages if storage.kind is Kind.GRADIENT]
    assert len(gradients) == len(parameters)


def test_a_batch_norm_runs_again_without_its_statistics():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    graph = capture(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.randn(2, 3, 8, 8),
        loss=lambda output, batch: output.sum(),
    )
    (norm,) = (operator for operator in graph.operators if operator.recompute_target)
    assert norm.recomputable
    assert norm.recompute_args is not None and norm.recompute_args[3:5] == (None, None)
    tensors = [torch.randn(2, 8, 6, 6), torch.rand(8), torch.rand(8)]
    statistics = [torch.zeros(8), torch.ones(8)]
    first, again = (
        getattr(getattr(torch.ops.aten, name), overload)
        for name, overload in (
            target.removeprefix("aten.").split(".")
            for target in (norm.target, norm.recompute_target)
        )
    )
    expected = first(*tensors, *statistics, *norm.args[5:])
    assert not torch.equal(statistics[0], torch.zeros(8))
    results = again(*tensors, *norm.recompute_args[3:])
    assert all(map(torch.equal, results, expected))


def test_random_operators_run_again_and_batch_statistics_do_not():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
    graph = capture(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.randn(2, 4),
        loss=lambda output, batch: output.sum(),
    )
    random = [operator for operator in graph.operators if operator.random]
    assert random and all(operator.recomputable for operator in random)
    updates = [operator for operator in graph.operators if operator.phase is Phase.OPTIMIZER]
    assert updates and not any(operator.recomputable for operator in updates)


def test_meta_fake_and_real_models_give_the_same_graph():
    def graph_of(model):
        return capture(model, torch.optim.AdamW(model.parameters()), CASES["mixture"].batch)

    real = graph_of(Mixture())
    with torch.device("meta"):
        meta = Mixture()
    assert graph_of(meta).digest == real.digest
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fake = Mixture()
    assert graph_of(fake).digest == real.digest


def test_operators_know_their_modules_also_in_the_backward_pass():
    case = CASES["lstm"]
    model = case.make()
    graph = capture(model, torch.optim.SGD(model.parameters()), case.batch, loss=case.loss)
    modules = {(operator.phase, operator.module) for operator in graph.operators}
    for name in ("embedding", "lstm", "head"):
        assert {(Phase.FORWARD, name), (Phase.BACKWARD, name)} <= modules


def test_random_operators_keep_their_order():
    case = CASES["gpt2"]
    model = case.make()
    graph = capture(model, torch.optim.SGD(model.parameters()), case.batch)
    drawing = [i for i, op in enumerate(graph.operators) if "bernoulli" in op.target]
    assert len(drawing) == 7
    assert [graph.operators[i].after for i in drawing] == [(), *((i,) for i in drawing[:-1])]
    assert all(graph.operators[i].random for i in drawing)


def test_likeness_is_no_need():
    """`empty_like(x)` and `zeros_like(x)` do not read x."""
    case = CASES["gpt2"]
    model = case.make()
    graph = capture(model, torch.optim.SGD(model.parameters()), case.batch)
    made = [each for each in graph.operators if each.target in ("penstock.empty", "penstock.full")]
    assert len(made) > 7
    assert all(each.reads == () for each in made)


def in_place(graph: StepGraph) -> StepGraph:
    """A graph in which every result that may takes the place of an operand that dies there."""
    final = {storage.final for storage in graph.storages} | {
        storage.initial for storage in graph.storages
    }
    moved: dict[int, int] = {}  # storage of a result: the storage that it is written into
    operators = []

    def at_home(storage: int) -> int:
        return at_home(moved[storage]) if storage in moved else storage

    for index, operator in enumerate(graph.operators):
        for read, created in operator.may_overwrite:
            if max(graph.consumers[read]) == index and not {read, created} & final:
                moved[graph.storage_of_value[created]] = graph.storage_of_value[read]
                operator = _written_over(operator, read, created)
                break
        operators.append(operator)
    return dataclasses.replace(
        graph,
        storages=graph.storages,
        storage_of_value=tuple(map(at_home, graph.storage_of_value)),
        operators=tuple(operators),
    )


def _written_over(operator: Operator, read: int, created: int) -> Operator:
    target, out = operator.target, operator.outputs[0]
    assert out is not None
    namespace, name, overload = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    written = next(
        each
        for each in packet.overloads()
        if each.endswith(("out", "grad_input"))
        and [a.type for a in getattr(packet, each)._schema.arguments][: len(operator.args)]
        == [a.type for a in getattr(packet, overload)._schema.arguments][: len(operator.args)]
    )
    argument = getattr(packet, written)._schema.arguments[-1].name
    return dataclasses.replace(
        operator,
        target=f"{namespace}.{name}.{written}",
        kwargs={**operator.kwargs, argument: TensorView(read, *out[1:])},
        outputs=(None,),
        reads=tuple(value for value in operator.reads if value != read),
        creates=(),
        mutates=((read, created),),
        may_overwrite=(),
        recomputable=False,
    )


@pytest.mark.parametrize("case", ["bert", "resnet", "llama", "lstm"])
def test_results_may_take_the_place_of_operands(case):
    num_changed = []

    def change(graph):
        changed = in_place(graph)
        pairs = zip(graph.operators, changed.operators, strict=True)
        num_changed.extend(one.target for one, other in pairs if one != other)
        return changed

    assert unlike_eager(CASES[case], OPTIMIZERS["adamw"], change=change) == []
    assert len(num_changed) > 5
    if case != "resnet":
        assert "aten._log_softmax_backward_data.default" in num_changed
