import pytest

import graph_cases
from penstock.errors import InfeasibleError
from penstock.graph import Kind, Phase
from penstock.planner import Budget, check
from penstock.planner._request import LinkRates
from penstock.planner.paging import Recomputation, peak_of_program_order
from planners.layers_lp import (
    Fractions,
    choose_values,
    find_layers,
    plan_layers_lp,
    solve_fractions,
)

UNIT = 256


def layered_step(num_layers=4, *, inner=3, recomputable=True):
    """Layers of two operators; backward needs what lies between them and what comes out."""
    build = graph_cases.GraphBuilder()
    x = build.storage(UNIT, Kind.INPUT, given=True)
    weights = [build.storage(UNIT, Kind.PARAMETER) for _ in range(num_layers)]
    outputs, inners = [x], []
    for layer, weight in enumerate(weights):
        module = f"model.layers.{layer}.block"
        inners.append(build.storage(inner * UNIT))
        build.run(
            reads=(outputs[-1], weight),
            creates=(inners[-1],),
            module=module,
            recomputable=recomputable,
        )
        outputs.append(build.storage(UNIT))
        build.run(reads=(inners[-1],), creates=(outputs[-1],), module=module)
    gradient = build.storage(UNIT, Kind.GRADIENT)
    loss = build.storage(4)
    build.run(reads=(outputs[-1],), creates=(gradient, loss), phase=Phase.BACKWARD)
    for layer in reversed(range(num_layers)):
        of_weight = build.storage(UNIT, Kind.GRADIENT)
        earlier = build.storage(UNIT, Kind.GRADIENT)
        build.run(
            reads=(gradient, inners[layer], outputs[layer], weights[layer]),
            creates=(of_weight, earlier),
            phase=Phase.BACKWARD,
            module=f"model.layers.{layer}.block",
        )
        build.run(
            reads=(of_weight,),
            mutates=((weights[layer], build.version(weights[layer])),),
            phase=Phase.OPTIMIZER,
            recomputable=False,
        )
        gradient = earlier
    return build.graph(loss)


def plan(graph, *, device_bytes, rate=UNIT):
    return plan_layers_lp(
        graph_cases.request(
            graph,
            budget=Budget(device_bytes=device_bytes, host_bytes=1 << 40),
            profile=graph_cases.machine(out=rate, back=rate),
            seconds=[1.0] * len(graph.operators),
        )
    )


def test_layers_are_modules_up_to_their_number():
    recomputation = Recomputation(layered_step(3))
    layers = find_layers(recomputation, [1.0] * 13)
    assert [layer.name for layer in layers] == [f"model.layers.{n}" for n in range(3)]
    assert [layer.num_bytes for layer in layers] == [4 * UNIT] * 3
    # What the next layer reads is where recomputation begins; the last one has no next.
    assert [layer.recomputable_bytes for layer in layers] == [3 * UNIT, 3 * UNIT, 4 * UNIT]
    assert [layer.forward_seconds for layer in layers] == [2.0] * 3
    borders = [saved.is_border for layer in layers for saved in layer.saved]
    assert borders == [False, True, False, True, False, False]


def test_what_is_dropped_is_made_again_before_it_is_needed():
    graph = layered_step(3)
    recomputation = Recomputation(graph)
    inner = {saved.value for saved in recomputation.saved() if saved.num_bytes == 3 * UNIT}
    order, dropped = recomputation.order_without(inner)
    assert dropped == inner
    assert len(order) == len(graph.operators) + 3
    again = [index for place, index in enumerate(order) if index in order[:place]]
    assert again == [4, 2, 0]  # the first operators of the layers, last layer first


def test_what_may_not_run_again_is_kept():
    graph = layered_step(3, recomputable=False)
    recomputation = Recomputation(graph)
    saved = recomputation.saved()
    order, dropped = recomputation.order_without({one.value for one in saved})
    assert all(one.chain is None for one in saved if one.num_bytes == 3 * UNIT)
    assert {graph.num_bytes(value) for value in dropped} <= {UNIT}
    assert len(order) > len(graph.operators)


def test_the_program_keeps_what_fits():
    layers = find_layers(Recomputation(layered_step(4)), [1.0] * 17)
    rates = LinkRates(1.0, 1.0)
    enough = solve_fractions(layers, 16 * UNIT, rates)
    assert enough is not None
    assert all(f.recompute + f.offload == pytest.approx(0, abs=1e-6) for f in enough)
    # 4 units a layer: with room for 10, 6 units of the first three have to go.
    tight = solve_fractions(layers, 10 * UNIT, rates)
    assert tight is not None
    gone = sum((f.recompute + f.offload) * 4 for f in tight[:3])
    assert gone == pytest.approx(6, rel=1e-5)
    assert solve_fractions(layers, 3 * UNIT, rates) is None  # less than one layer


def test_a_fast_link_offloads_and_a_slow_one_recomputes():
    layers = find_layers(Recomputation(layered_step(4)), [1.0] * 17)
    fast = solve_fractions(layers, 8 * UNIT, LinkRates(1e6, 1e6))
    slow = solve_fractions(layers, 8 * UNIT, LinkRates(1.0, 1.0))
    assert fast is not None
    assert slow is not None
    assert sum(f.offload for f in fast) > 0.5
    assert sum(f.recompute for f in fast) == pytest.approx(0, abs=1e-6)
    assert sum(f.offload for f in slow) < 0.1
    assert sum(f.recompute for f in slow) > 0.5


def test_values_follow_the_fractions():
    layer = find_layers(Recomputation(layered_step(4)), [1.0] * 17)[0]
    inner, border = (saved.value for saved in layer.saved)
    choose = [choose_values(layer, f, [1.0] * 17) for f in (Fractions(0.75, 0), Fractions(0, 0.7))]
    assert choose == [({inner}, set()), (set(), {inner})]
    assert choose_values(layer, Fractions(0, 1.0), [1.0] * 17) == (set(), {inner, border})


@pytest.mark.parametrize("share", [1.0, 0.9, 0.8, 0.7])
@pytest.mark.parametrize("rate", [UNIT / 4, UNIT * 16])
def test_plans_pass_the_checker(share, rate):
    graph = layered_step(5)
    found = plan(graph, device_bytes=int(peak_of_program_order(graph) * share), rate=rate)
    check(graph, found)
    if share == 1.0:
        assert found.step_seconds == found.ideal_seconds
    kinds = {graph.storages[graph.storage_of_value[t.value]].kind for t in found.transfers}
    assert kinds <= {Kind.ACTIVATION}


def test_a_slow_link_makes_the_plan_recompute():
    graph = layered_step(5)
    found = plan(graph, device_bytes=int(peak_of_program_order(graph) * 0.7), rate=UNIT / 4)
    assert found.recomputed
    assert found.step_seconds < 1.3 * found.ideal_seconds


def test_parameters_that_do_not_fit_have_no_plan():
    with pytest.raises(InfeasibleError, match="keeps parameters"):
        plan(layered_step(5), device_bytes=6 * UNIT)
