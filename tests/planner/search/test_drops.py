"""What is dropped: repeated layers share roles, changes interval within what can be made again."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from graph_cases import GraphBuilder, chain_step, step_graphs
from penstock.graph import Kind, Phase
from penstock.planner.search._drops import DropFamilies, DropProposals, find_roles
from penstock.planner.search._orders import move_gradients_late, move_updates_early
from penstock.planner.search._recompute import RecomputeChains, mark_brief


def drops_of(graph):
    seconds = np.ones(len(graph.operators))
    return DropFamilies(graph, RecomputeChains(graph), seconds, 1.0)


def test_equal_layers_share_their_roles():
    few, many = (chain_step(num_layers) for num_layers in (12, 24))
    num_roles = [len(set(find_roles(graph))) for graph in (few, many)]
    assert num_roles[0] == num_roles[1] < len(few.storages)
    by_role = {}
    for item, role in enumerate(find_roles(many)):
        by_role.setdefault(role, []).append(many.storages[item].num_bytes)
    assert all(len(set(sizes)) == 1 for sizes in by_role.values())
    assert max(map(len, by_role.values())) >= 12


def test_a_change_touches_only_what_can_be_made_again_and_changes_something():
    graph = chain_step(12)
    drops = drops_of(graph)
    moves = DropProposals(drops, np.random.default_rng(0))
    dropped, seen = frozenset(), set()
    for _ in range(200):
        changed = moves.propose(dropped)
        assert changed <= drops.made_at.keys() | mark_brief(drops.made_at)
        assert changed != dropped
        seen.add(len(changed ^ dropped))
        dropped = changed
    assert 1 in seen and max(seen) > 3  # single values, and stretches


def test_what_is_dropped_briefly_is_made_again_for_each_use():
    build = GraphBuilder()
    x = build.storage(1, Kind.INPUT, given=True)
    kept, end = build.storage(100), build.storage(1)
    build.run(reads=(x,), creates=(kept,))
    build.run(reads=(kept,), creates=(end,))
    for _ in range(2):
        between, end, read = build.storage(100), build.storage(1), end
        build.run(reads=(read,), creates=(between,), phase=Phase.BACKWARD)
        build.run(reads=(between,), creates=(end,), phase=Phase.BACKWARD)
        end, read = build.storage(1), end
        build.run(reads=(read, kept), creates=(end,), phase=Phase.BACKWARD)
    graph = build.graph(end)
    item = graph.storage_of_value[kept]
    assert expand(graph, {item}) == [0, 1, 2, 3, 0, 4, 5, 6, 7]
    assert expand(graph, {item, ~item}) == [0, 1, 2, 3, 0, 4, 5, 6, 0, 7]


def expand(graph, dropped):
    found = RecomputeChains(graph).expand(np.arange(len(graph.operators)), dropped)
    return None if found is None else found.tolist()


@given(st.one_of(step_graphs(max_operators=12), st.integers(1, 6).map(chain_step)), st.data())
def test_operators_run_again_when_what_is_dropped_is_needed_and_only_then(graph, data):
    able = sorted(RecomputeChains(graph).chain_of)
    dropped = frozenset(data.draw(st.sets(st.sampled_from(able)))) if able else frozenset()
    brief = frozenset(data.draw(st.sets(st.sampled_from(sorted(dropped))))) if dropped else dropped
    order = expand(graph, dropped | mark_brief(brief))
    if order is None:
        return
    firsts = list(dict.fromkeys(order))
    assert firsts == list(range(len(graph.operators)))
    given_up = {index: set() for index in firsts}  # after the last use, and that before the turn
    for item in dropped:
        uses = [index for index in firsts if item in touched(graph, index)]
        phases = [graph.operators[index].phase is Phase.FORWARD for index in uses]
        given_up[uses[-1]].add(item)
        if False in phases and phases[0]:
            given_up[uses[phases.index(False) - 1]].add(item)
    there = {s.initial for s in graph.storages if s.initial is not None}
    ran: list[int] = []
    for index in order:
        operator = graph.operators[index]
        is_again = index in ran
        anew = is_again and operator.recompute_target is not None
        makes = operator.creates if anew else operator.makes
        assert there.issuperset(operator.reads if anew else operator.needs)
        assert not (is_again and there.issuperset(makes))  # something was missing
        own = {graph.storage_of_value[value] for value in makes}
        there = {value for value in there if graph.storage_of_value[value] not in own} | {*makes}
        ran.append(index)
        if is_again:
            continue
        gone = set(given_up[index])
        if operator.phase is not Phase.FORWARD:  # with what ran again for it
            firsts_at = [at for at, other in enumerate(ran[:-1]) if ran.index(other) == at]
            gone |= brief & set().union(
                *(touched(graph, other) for other in ran[max(firsts_at, default=-1) + 1 :])
            )
        there = {value for value in there if graph.storage_of_value[value] not in gone}


def touched(graph, index):
    operator = graph.operators[index]
    return {graph.storage_of_value[value] for value in (*operator.needs, *operator.makes)}


def last_updates_step(num_layers):
    """A chain whose updates all come at the end, as an optimizer's do."""
    graph = chain_step(num_layers, weight_bytes=400, activation_bytes=100)
    rank = [operator.phase is Phase.OPTIMIZER for operator in graph.operators]
    order = sorted(range(len(rank)), key=lambda index: rank[index])
    return dataclasses.replace(graph, operators=tuple(graph.operators[i] for i in order))


def recurrent_step(num_uses):
    """A weight that is used many times: its gradient is a sum of as many parts."""
    build = GraphBuilder()
    weight = build.storage(100, Kind.PARAMETER)
    states = [build.storage(1, Kind.INPUT, given=True)]
    for _ in range(num_uses):
        states.append(build.storage(1))
        build.run(reads=(states[-2], weight), creates=(states[-1],))
    back, total = build.storage(1, Kind.GRADIENT), None
    build.run(reads=(states[-1],), creates=(back,), phase=Phase.BACKWARD)
    for state in reversed(states[:-1]):
        part, earlier = build.storage(100, Kind.GRADIENT), build.storage(1, Kind.GRADIENT)
        build.run(reads=(back, state), creates=(part,), phase=Phase.BACKWARD)
        build.run(reads=(back, weight), creates=(earlier,), phase=Phase.BACKWARD)
        if total is not None:
            added = build.storage(100, Kind.GRADIENT)
            build.run(reads=(total, part), creates=(added,), phase=Phase.BACKWARD)
            part = added
        total, back = part, earlier
    assert total is not None
    new = build.version(weight)
    build.run(reads=(total,), mutates=((weight, new),), phase=Phase.OPTIMIZER, recomputable=False)
    return build.graph()


def assert_is_an_order(graph, order):
    assert sorted(order) == list(range(len(graph.operators)))
    at = {index: position for position, index in enumerate(order)}
    for index, before in enumerate(graph.predecessors):
        assert all(at[other] < at[index] for other in before)
    return at


def test_updates_run_as_soon_as_their_gradients_are_there():
    graph = last_updates_step(8)
    at = assert_is_an_order(graph, move_updates_early(graph).tolist())
    for index, before in enumerate(graph.predecessors):
        if graph.operators[index].phase is Phase.OPTIMIZER:
            assert at[index] == max(at[other] for other in before) + 1


def test_the_parts_of_a_gradient_are_made_one_after_the_other():
    graph = recurrent_step(6)
    order = move_gradients_late(graph).tolist()
    at = assert_is_an_order(graph, order)
    of_weight = [i for i, operator in enumerate(graph.operators) if _adds(graph, i)]
    assert sorted(at[index] for index in of_weight) == list(
        range(len(order) - len(of_weight), len(order))
    )


def _adds(graph, index):
    """Whether an operator makes a part of the gradient, a sum of parts, or the update."""
    storages = [graph.storages[graph.storage_of_value[v]] for v in graph.operators[index].makes]
    return any(storage.num_bytes == 100 for storage in storages)


@given(graph=step_graphs(max_operators=12))
def test_suggested_orders_are_valid(graph):
    for suggest in (move_updates_early, move_gradients_late):
        assert_is_an_order(graph, suggest(graph).tolist())
