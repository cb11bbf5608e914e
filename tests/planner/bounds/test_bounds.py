"""No valid plan is faster than its lower bound, and bounds are sharp where they can be."""

import dataclasses
import gc
import random
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brute_force import brute_force
from graph_cases import (
    GraphBuilder,
    chain_step,
    machine,
    occupied_bytes,
    random_graph,
    random_plan,
    request,
)
from penstock.errors import InfeasibleError
from penstock.graph import Kind
from penstock.planner import Budget, lower_bound
from penstock.planner._request import LinkRates
from penstock.planner.bounds import _forced
from penstock.planner.bounds._bounds import working_set
from penstock.planner.bounds._fixed_order import tabulate_live_ranges
from penstock.planner.bounds._forced import _found, find_forced, forced_bounds

HOST = 1 << 30


@settings(max_examples=80, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.booleans(),
    st.sampled_from([0.0, 0.2, 0.5]),
    st.sampled_from([(1.0, 1.0), (0.2, 0.1), (0.1, 0.3), (3.0, 1.0)]),
    st.booleans(),
)
def test_no_plan_is_faster(rng, training, keep, rates, again):
    if training:
        graph = chain_step(rng.randint(1, 8), in_place=rng.random() < 0.5)
    else:
        graph = random_graph(rng, rng.randint(1, 10))
    plan = random_plan(graph, rng, keep=keep, rates=rates, again=again, early=rng.random() < 0.5)
    budget = Budget(device_bytes=occupied_bytes(graph, plan), host_bytes=HOST)
    first_runs = list(dict.fromkeys(plan.order))
    for reorder in (False, True):
        for recompute in (True,) if len(first_runs) < len(plan.order) else (False, True):
            bound = lower_bound(
                request(
                    graph,
                    budget=budget,
                    profile=plan.machine,
                    seconds=plan.operator_seconds,
                    reorder=reorder,
                    recompute=recompute,
                ),
                order=first_runs,
            )
            for name, seconds in bound.seconds_of.items():
                assert seconds <= plan.step_seconds * (1 + 1e-7) + 1e-9, name


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans(), st.booleans(), st.floats(0, 1))
def test_the_fastest_plan_is_not_faster(rng, reorder, recompute, share):
    """Plans of the brute force are near the bounds, where random ones are far."""
    if rng.random() < 0.3:
        graph = chain_step(1, in_place=rng.random() < 0.5)
    else:
        graph = random_graph(rng, rng.randint(2, 5), persistent=rng.random() < 0.6)
    seconds = [rng.choice([0.0, 0.1, 1.0, 3.0]) for _ in graph.operators]
    lives = tabulate_live_ranges(graph, range(len(seconds)))
    most, least = int(lives.live_bytes.max()), working_set(graph).num_bytes
    budget = Budget(device_bytes=least + round(share**2 * max(0, most - least)), host_bytes=HOST)
    out, back = rng.choice([(1.0, 1.0), (0.5, 1.0), (2.0, 3.0), (0.05, 0.05)])
    profile = machine(out=out, back=back)
    frozen = {"reorder": reorder, "recompute": recompute}
    try:
        best = brute_force(
            request(
                graph, budget=budget, profile=profile, seconds=seconds, time_limit=0.3, **frozen
            )
        )
    except InfeasibleError:
        return
    bound = lower_bound(request(graph, budget=budget, profile=profile, seconds=seconds, **frozen))
    for name, least_seconds in bound.seconds_of.items():
        assert least_seconds <= best.step_seconds * (1 + 1e-6) + 1e-9, name


def bound_of(graph, device_bytes, *, seconds=1.0, reorder=False, recompute=False, **rates):
    return lower_bound(
        request(
            graph,
            budget=Budget(device_bytes=device_bytes, host_bytes=HOST),
            profile=machine(**rates),
            seconds=[seconds] * len(graph.operators),
            reorder=reorder,
            recompute=recompute,
        )
    )


def test_with_memory_enough_only_computing_counts():
    bound = bound_of(chain_step(3), 1 << 20)
    assert (bound.binding, bound.seconds) == ("compute", 10.0)
    assert (
        lower_bound(
            request(chain_step(3), budget=Budget(), profile=machine(), seconds=[2.0] * 10)
        ).seconds
        == 20.0
    )


def saved_for_later(num_values, *, recomputable=False):
    """Values of 10 bytes are made one after the other and used in the reverse order."""
    build = GraphBuilder()
    values = [build.storage(10) for _ in range(num_values)]
    for value in values:
        build.run(creates=(value,), recomputable=recomputable)
    for value in reversed(values):
        build.run(reads=(value,), creates=(build.storage(1),), recomputable=recomputable)
    return build.graph(len(build.storage_of_value) - 1)


def test_what_leaves_before_the_middle_comes_back_after_it():
    # At the first use 60 bytes and a result are alive and 20 fit: 41 leave at 2 bytes per second,
    # then come back at 5 bytes per second. Values are whole: 41 bytes are five of them.
    bound = bound_of(saved_for_later(6), 20, seconds=0.001, out=2.0, back=5.0)
    assert bound.seconds_of["windows"] == pytest.approx(41 / 2 + 41 / 5, rel=0.01)
    assert bound.binding == "segments"
    assert bound.seconds == pytest.approx(50 / 2 + 50 / 5, rel=0.01)
    assert bound.seconds_of["residency_lp"] == pytest.approx(41 / 2, rel=1e-3)


def three_layers():
    """Layers of a weight of 10 bytes each, with operands and results of one byte."""
    build = GraphBuilder()
    x = build.storage(1, Kind.INPUT, given=True)
    for _ in range(3):
        x, read = build.storage(1), x
        build.run(reads=(read, build.storage(10, Kind.PARAMETER)), creates=(x,))
    return build.graph(x)


def test_a_share_of_a_large_value_is_no_value():
    # Two of three weights fit, with an operand and a result. If the first stays, for the next step,
    # the second and the third have one place: the third comes in, 10 bytes at 2 bytes per second,
    # when the second operator has run. If it does not, it comes in as well as the third.
    bound = bound_of(three_layers(), 27, seconds=1.0, back=2.0)
    assert bound.binding == "segments"
    assert bound.seconds == pytest.approx(1 + (1 + 5) + 1, rel=1e-3)
    assert bound.seconds_of["windows"] < 4.5


def test_large_values_leave_before_they_are_missing_and_come_back_after():
    # While the third value is made one of the first two is missing, whole: it has gone out before
    # and comes back after it.
    bound = bound_of(saved_for_later(3), 25, seconds=0.001, out=2.0, back=5.0)
    assert bound.seconds_of["segments"] == pytest.approx(10 / 2 + 10 / 5, rel=1e-2)
    assert bound.seconds_of["windows"] == pytest.approx(6 / 2 + 6 / 5, rel=1e-2)


def test_what_has_no_place_while_an_operator_runs_moves_before_or_after_it():
    # One weight fits beside an operand and a result: the next comes in, 10 bytes at 2 bytes per
    # second, when the operator that needs this one has run.
    bound = bound_of(three_layers(), 13, seconds=1.0, back=2.0)
    assert bound.seconds_of["segments"] == pytest.approx(3 * (1 + 10 / 2), rel=1e-3)
    # The first of two values goes out after it has been made and before the second is; it comes in
    # again after the second has been used.
    bound = bound_of(saved_for_later(2), 12, seconds=1.0, out=2.0, back=5.0)
    assert bound.seconds_of["segments"] == pytest.approx(4 + 10 / 2 + 10 / 5, rel=1e-3)


def test_in_a_free_order_the_same_values_need_not_be_alive_together():
    graph = saved_for_later(6)
    assert bound_of(graph, 20, seconds=0.001, reorder=True).seconds == pytest.approx(0.012)
    names = set(bound_of(graph, 20, reorder=True).seconds_of)
    assert names == {"compute", "cut", "persistent", "chain"}
    names = set(bound_of(graph, 20, reorder=True, recompute=True).seconds_of)
    assert names == {"compute", "cut", "persistent", "chain", "remaking"}


def there_and_back(num_layers, *, in_between=False, recomputable=False):
    """Layers that make 10 bytes each, of what the layer before made; then each is used, last first.

    `in_between`: a layer makes 10 bytes that only its own second operator reads.
    """
    build = GraphBuilder()
    y, kept = build.storage(0, Kind.INPUT, given=True), []
    for _ in range(num_layers):
        if in_between:
            y, read = build.storage(10), y
            build.run(reads=(read,), creates=(y,), recomputable=recomputable)
        y, read = build.storage(10), y
        build.run(reads=(read,), creates=(y,), recomputable=recomputable)
        kept.append(y)
    result = build.storage(1)
    build.run(reads=(y,), creates=(result,), recomputable=False)
    for value in reversed(kept):
        result, read = build.storage(1), result
        build.run(reads=(read, value), creates=(result,), recomputable=False)
    return build.graph(result)


def test_in_any_order_what_leaves_before_the_turn_comes_back_after_it():
    # At the first use after the turn 60 bytes and two results are alive; 31 fit.
    bound = bound_of(there_and_back(6), 31, seconds=0.001, reorder=True, out=2.0, back=5.0)
    assert bound.seconds_of["cut"] == pytest.approx(31 / 2 + 31 / 5, rel=0.01)
    assert bound.seconds_of["chain"] == pytest.approx(31 / 2 + 31 / 5, rel=0.01)


def test_a_chain_knows_when_things_have_to_be_back():
    # Two turns, one after the other: what leaves for the first has to be back before the second.
    build = GraphBuilder()
    y = build.storage(0, Kind.INPUT, given=True)
    for _ in range(2):
        kept, large, end = (build.storage(n) for n in (20, 40, 1))
        build.run(reads=(y,), creates=(kept,), recomputable=False)
        build.run(reads=(kept,), creates=(large,), recomputable=False)
        middle = build.storage(1)
        build.run(reads=(large,), creates=(middle,), recomputable=False)
        build.run(reads=(middle, kept), creates=(end,), recomputable=False)
        y = end
    graph = build.graph(y)
    # While `large` is read, 20 and 40 and 1 are alive, and 60 fit; all that leaves comes back.
    bound = bound_of(graph, 60, seconds=0.001, reorder=True, out=0.1, back=0.1)
    assert bound.seconds_of["cut"] == pytest.approx(2 * 1 / 0.1, rel=0.01)
    assert bound.seconds_of["chain"] == pytest.approx(2 * 2 * 1 / 0.1, rel=0.01)


def test_what_is_made_again_needs_operands_that_are_made_again():
    slow_link = {"out": 0.001, "back": 0.001, "reorder": True, "recompute": True}
    graph = there_and_back(6, in_between=True, recomputable=True)
    bound = bound_of(graph, 31, **slow_link)
    # When the last layer is made, of 70 bytes 39 are missing, in parts of values of 10 bytes. `cut`
    # knows prices up to a quarter of a power of two.
    assert bound.seconds_of["cut"] == pytest.approx(19 + 39 * 2**-3.5, rel=1e-3)
    assert bound.seconds_of["remaking"] == pytest.approx(19 + 2 * 3.9, rel=1e-3)
    bound = bound_of(there_and_back(6, recomputable=True), 31, **slow_link)
    assert bound.seconds_of["remaking"] == pytest.approx(13 + 3.1, rel=1e-3)


def two_operands(rng=None):
    """Two values of 10 bytes, each made of 6 others, and an operator that needs both.

    With random numbers: other sizes, operands in common, something kept for later.
    """
    build = GraphBuilder()
    size = (lambda usual: rng.randint(1, usual)) if rng else (lambda usual: usual)
    again = (lambda: rng.random() < 0.7) if rng else (lambda: False)
    start = build.storage(size(2), Kind.INPUT, given=True)
    shared = rng is not None and rng.random() < 0.4
    operands, large = [], []
    for number in range(2):
        if not (shared and number):
            operands.append(build.storage(size(8) if rng else 6))
            build.run(reads=(start,), creates=(operands[-1],), recomputable=again())
        large.append(build.storage(size(10) + 4 * bool(rng)))
        build.run(reads=(operands[-1],), creates=(large[-1],), recomputable=again())
    result = build.storage(1)
    late = (operands[0],) if rng and rng.random() < 0.3 else ()
    build.run(reads=tuple(large), creates=(result,), recomputable=False)
    if late or (rng and rng.random() < 0.3):
        result, read = build.storage(1), result
        build.run(reads=(read, *late), creates=(result,), recomputable=False)
    return build.graph(result)


def test_an_operand_leaves_while_the_other_one_is_made():
    # 22 bytes hold both values and a result, or one and an operand of the other, never 26. A second
    # each for the operand, the value, which leaves at 2 bytes per second while the other operand is
    # made, the other value, then 10 bytes come in at 5 bytes per second, then the user.
    graph = two_operands()
    asked = request(
        graph,
        budget=Budget(device_bytes=22, host_bytes=HOST),
        profile=machine(out=2.0, back=5.0),
        seconds=1.0,
        time_limit=20,
    )
    bound = lower_bound(asked)
    assert bound.binding == "exclusion"
    assert bound.seconds == pytest.approx(1 + 1 + 10 / 2 + 1 + 10 / 5 + 1, rel=1e-3)
    assert brute_force(asked).step_seconds == pytest.approx(bound.seconds, rel=1e-3)
    assert "exclusion" not in bound_of(graph, 26, reorder=True, recompute=True).seconds_of


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_no_plan_of_operands_that_exclude_each_other_is_faster(rng):
    graph = two_operands(rng)
    seconds = [rng.choice([0.0, 0.1, 1.0, 3.0]) for _ in graph.operators]
    least = working_set(graph).num_bytes
    budget = Budget(device_bytes=least + rng.choice([0, 1, 2, 5]), host_bytes=HOST)
    out, back = rng.choice([(1.0, 1.0), (0.5, 1.0), (2.0, 3.0), (5.0, 4.0)])
    asked = request(
        graph, budget=budget, profile=machine(out=out, back=back), seconds=seconds, time_limit=1.0
    )
    bound = lower_bound(asked)
    try:
        best = brute_force(asked, max_again=2)
    except InfeasibleError:
        return
    for name, least_seconds in bound.seconds_of.items():
        assert least_seconds <= best.step_seconds * (1 + 1e-6) + 1e-9, name


def test_operands_are_kept_where_that_is_less_than_making_them_again():
    # What is in between has a byte and takes 50 s: it is kept, or leaves and comes back.
    build = GraphBuilder()
    y, kept, seconds = build.storage(0, Kind.INPUT, given=True), [], []
    for _ in range(6):
        for size, takes in ((1, 50.0), (10, 1.0)):
            y, read = build.storage(size), y
            build.run(reads=(read,), creates=(y,))
            seconds.append(takes)
        kept.append(y)
    result = build.storage(1)
    build.run(reads=(y,), creates=(result,), recomputable=False)
    for value in reversed(kept):
        result, read = build.storage(1), result
        build.run(reads=(read, value), creates=(result,), recomputable=False)
    graph = build.graph(result)
    seconds += [1.0] * 7
    budget = Budget(device_bytes=34, host_bytes=HOST)
    slow = machine(out=0.001, back=0.001)
    bound = lower_bound(
        request(graph, budget=budget, profile=slow, seconds=seconds, reorder=True, recompute=True)
    )
    # 27 bytes are missing: shares of values at a second for 9 bytes, a byte of ten kept for each.
    assert bound.seconds_of["remaking"] == pytest.approx(sum(seconds) + 27 / 9, rel=1e-3)


def test_what_an_ancestor_makes_for_a_descendant_is_alive():
    build = GraphBuilder()
    kept = [build.storage(10) for _ in range(4)]
    middle, end = build.storage(1), build.storage(1)
    build.run(creates=tuple(kept[:2]), recomputable=False)
    build.run(creates=(*kept[2:], middle), reads=(kept[0],), recomputable=False)
    large = build.storage(35)
    build.run(reads=(middle,), creates=(large,), recomputable=False)
    build.run(reads=(large, *kept[:1], *kept[2:]), creates=(end,), recomputable=False)
    graph = build.graph(end)
    # The third one makes 35 bytes of 1, while 30 are kept: 66 of 66 + 1.
    assert bound_of(graph, 80, reorder=True).seconds == pytest.approx(4.0)
    bound = bound_of(graph, 66 - 0, seconds=0.5, reorder=True)
    assert bound.seconds == pytest.approx(2.0)
    with pytest.raises(InfeasibleError):
        bound_of(graph, 60, reorder=True)


def test_parameters_beyond_the_memory_come_in_every_step():
    build = GraphBuilder()
    x = build.storage(1, Kind.INPUT, given=True)
    for _ in range(5):
        y = build.storage(1)
        build.run(reads=(x, build.storage(10, Kind.PARAMETER)), creates=(y,))
        x = y
    graph = build.graph(x)
    # While one of them is used, with an operand and a result, 20 bytes of weights have a place.
    free = bound_of(graph, 22, seconds=0.1, back=2.0, reorder=True)
    assert free.seconds_of["persistent"] == pytest.approx((50 - 20) / 2, rel=1e-3)
    # In a fixed order whoever is used next is the last that was there: at best 1/4 of the bytes of
    # those that are not in use need not come in.
    frozen = bound_of(graph, 22, seconds=0.1, back=2.0)
    assert frozen.seconds == pytest.approx(50 * (1 - 1 / 4) / 2, rel=1e-3)
    # Each needs what the one before makes: no other order exists, and the chain knows that.
    assert free.seconds_of["chain"] == pytest.approx(frozen.seconds, rel=1e-3)


def test_what_can_be_made_again_costs_its_time_or_its_bytes():
    slow_link = {"out": 0.001, "back": 0.001}
    again = saved_for_later(6, recomputable=True)
    once = saved_for_later(6)
    # Four of six values are made once more, a second each.
    for graph, least in ((again, 12 + 4), (once, 40 / 0.001)):
        bound = bound_of(graph, 20, recompute=True, **slow_link)
        assert bound.seconds >= least * 0.99
    assert bound_of(again, 20, recompute=True, **slow_link).seconds < 20


def test_what_was_found_of_a_graph_is_kept_as_long_as_it_lives():
    graph = there_and_back(3)
    ones, twos = ([seconds] * len(graph.operators) for seconds in (1.0, 2.0))
    found = find_forced(graph, ones, recompute=False)
    assert find_forced(graph, tuple(ones), recompute=False) is found
    assert find_forced(graph, ones, recompute=True) is not found
    assert find_forced(there_and_back(3), ones, recompute=False) is not found
    slower = find_forced(graph, twos, recompute=False)
    assert (slower.seconds_before == 2 * found.seconds_before).all()
    fitting, tight = (bound_of(graph, num_bytes, reorder=True) for num_bytes in (60, 20))
    again = bound_of(graph, 60, reorder=True)
    assert again == fitting
    assert tight.seconds_of["cut"] > fitting.seconds_of["cut"]
    key, alive = id(graph), weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None
    assert key not in _found


def test_an_operator_that_does_not_fit_is_named():
    with pytest.raises(InfeasibleError) as raised:
        bound_of(chain_step(2), 15)
    assert raised.value.minimum_device_bytes == 20
    assert raised.value.operator == "op3"
    assert raised.value.proved


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 10))
def test_lives_are_what_an_all_resident_plan_holds(seed, num_operators):
    rng = random.Random(seed)
    graph = random_graph(rng, num_operators)
    graph = dataclasses.replace(
        graph, operators=tuple(dataclasses.replace(o, may_overwrite=()) for o in graph.operators)
    )
    plan = random_plan(graph, rng, again=False, keep=1.1)
    lives = tabulate_live_ranges(graph, plan.order)
    held = np.zeros(len(plan.order), dtype=int)
    used = {value for value in range(len(graph.storage_of_value)) if graph.consumers[value]}
    made = {value for operator in graph.operators for value in operator.makes}
    for value, _, num_bytes, start, end in plan.placements:
        if value in used | made:
            for position in range(start, end):
                held[position % len(plan.order)] += num_bytes
    assert held.tolist() == lives.live_bytes.tolist()


def test_operators_that_are_left_out_do_not_bind(monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(0)
    num_different = 0
    for _ in range(12):
        graph = chain_step(rng.randint(2, 8), in_place=rng.random() < 0.5)
        seconds = [rng.choice([0.1, 1.0, rng.random()]) for _ in graph.operators]
        forced = find_forced(graph, seconds, recompute=True)
        for share in (0.3, 0.6, 0.9):
            given = forced, seconds, int(share * forced.here.max()), LinkRates(0.5, 2.0)
            bounds = forced_bounds(*given)
            with monkeypatch.context() as patch:
                patch.setattr(_forced, "_FEW_OPERATORS", 0)
                patch.setattr(_forced._Operators, "prune", lambda operators, _: operators)
                assert forced_bounds(*given) == bounds
            num_different += bounds["cut"] > sum(seconds)
    assert num_different > 12
