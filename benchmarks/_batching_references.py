"""References for batches and schedules, written from the published descriptions.

- `nugraph_batches`: the largest tenth is dealt over the batches first, the rest fills them up
  (Lee et al., Frontiers in High Performance Computing 2, 2024).
- `first_fit_decreasing`: the classic of bin packing, over the whole epoch.
- `ratio_rule` and `learned_automaton`: ED-Batch (arXiv 2302.03851): the type of which the largest
  part of its own frontier is ready; and a table from sets of ready types to types, learned with
  that ratio as the reward.
- `by_depth`: TensorFlow Fold (Looks et al. 2017), operator by operator and depth by depth.
- `fold_step`: its execution as torchfold does it, with operands put together by concatenation.
- `frame_step`: its execution as libraries of trees do it by hand: the states of all nodes are
  rows of one tensor per component, read by index and written in place.
"""

from __future__ import annotations

import functools
from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch

Policy = Callable[[list[list[int]], list[int]], int]


def nugraph_batches(costs, batch_size, random, balance=0.1):
    """Batches of the published rule; what does not fill a batch is dropped, as there."""
    num_batches = len(costs) // batch_size
    order = np.argsort(-costs, kind="stable")
    num_large = int(balance * len(costs))
    large, rest = random.permutation(order[:num_large]), random.permutation(order[num_large:])
    batches = [[] for _ in range(num_batches)]
    for place, sample in enumerate(large.tolist()):
        if len(batches[place % num_batches]) < batch_size:
            batches[place % num_batches].append(sample)
    waiting = iter(rest.tolist())
    for batch in batches:
        while len(batch) < batch_size:
            batch.append(next(waiting))
    return batches


def first_fit_decreasing(costs, cap):
    """Batches below a cap: every sample, the largest first, into the first batch with room."""
    room, batches = [], []
    for sample in np.argsort(-costs, kind="stable").tolist():
        cost = int(costs[sample])
        place = next((k for k, free in enumerate(room) if free >= cost), None)
        if place is None:
            place = len(room)
            room.append(cap)
            batches.append([])
        room[place] -= cost
        batches[place].append(sample)
    return batches


class Simulation:
    """A graph that is executed type by type, with the frontier of every type's own graph."""

    def __init__(self, types: Sequence[int], arguments: Sequence[Sequence[int]]) -> None:
        self.types, self.arguments = list(types), [sorted(set(each)) for each in arguments]
        self.num_types = max(types) + 1
        self.readers: list[list[int]] = [[] for _ in types]
        self.followers: list[list[int]] = [[] for _ in types]  # nearest of the same type
        self.num_before = [0] * len(self.types)
        nearest: list[dict[int, frozenset[int]]] = []
        for node, kind in enumerate(self.types):
            mine: dict[int, set[int]] = {}
            for argument in self.arguments[node]:
                self.readers[argument].append(node)
                own = self.types[argument]
                for other, nodes in nearest[argument].items():
                    if other != own:
                        mine.setdefault(other, set()).update(nodes)
                mine.setdefault(own, set()).add(argument)
            nearest.append({other: frozenset(nodes) for other, nodes in mine.items()})
            for before in nearest[node].get(kind, ()):
                self.followers[before].append(node)
            self.num_before[node] = len(nearest[node].get(kind, ()))

    def run(self, policy: Policy) -> list[tuple[int, list[int]]]:
        """Execute everything; `policy` gets the ready nodes and the frontier's size by type."""
        waits = [len(each) for each in self.arguments]
        before = list(self.num_before)
        ready: list[list[int]] = [[] for _ in range(self.num_types)]
        frontier = [0] * self.num_types
        for node, kind in enumerate(self.types):
            if waits[node] == 0:
                ready[kind].append(node)
            frontier[kind] += before[node] == 0
        done = []
        while any(ready):
            kind = policy(ready, frontier)
            batch, ready[kind] = ready[kind], []
            done.append((kind, batch))
            frontier[kind] -= len(batch)
            for node in batch:
                for follower in self.followers[node]:
                    before[follower] -= 1
                    frontier[kind] += before[follower] == 0
                for reader in self.readers[node]:
                    waits[reader] -= 1
                    if waits[reader] == 0:
                        ready[self.types[reader]].append(reader)
        return done


def ratio_rule(ready: list[list[int]], frontier: list[int]) -> int:
    """The type of which the largest part of the frontier is ready; the first among equals."""
    kinds = [kind for kind, nodes in enumerate(ready) if nodes]
    return max(kinds, key=lambda kind: len(ready[kind]) / frontier[kind])


def learned_automaton(simulation: Simulation, bound: int, *, iterations: int, seed: int = 0):
    """The batches of a table learned by tabular Q-learning with returns of ten steps."""
    random = np.random.default_rng(seed)
    table: dict[tuple[frozenset[int], int], float] = {}

    def best(state: frozenset[int]) -> int:
        return max(sorted(state), key=lambda kind: table.get((state, kind), 0.0))

    def greedy(ready: list[list[int]], frontier: list[int]) -> int:
        return best(frozenset(kind for kind, nodes in enumerate(ready) if nodes))

    exploration, result = 0.5, None
    for iteration in range(iterations):
        trace: list[tuple[frozenset[int], int, float]] = []

        def explore(ready, frontier, trace=trace, exploration=exploration):
            state = frozenset(kind for kind, nodes in enumerate(ready) if nodes)
            kind = best(state)
            if random.random() < exploration:
                kind = sorted(state)[int(random.integers(len(state)))]
            trace.append((state, kind, len(ready[kind]) / frontier[kind] - 1))
            return kind

        simulation.run(explore)
        for step, (state, kind, _) in enumerate(trace):
            value = sum(reward for _, _, reward in trace[step : step + 10])
            if step + 10 < len(trace):
                later = trace[step + 10][0]
                value += max(table.get((later, other), 0.0) for other in later)
            old = table.get((state, kind), 0.0)
            table[state, kind] = old + 0.4 * (value - old)
        exploration = max(0.05, 0.9 * exploration)
        if iteration % 50 == 49 or iteration == iterations - 1:
            found = simulation.run(greedy)
            if result is None or len(found) < len(result):
                result = found
            if len(result) <= 1.01 * bound:
                break
    assert result is not None
    return result


def by_depth(types: Sequence[int], arguments: Sequence[Sequence[int]]) -> list[list[int]]:
    """Nodes of one type and depth together, depth by depth."""
    depth: list[int] = []
    for mine in arguments:
        depth.append(1 + max((depth[argument] for argument in mine), default=-1))
    batches: dict[tuple[int, int], list[int]] = {}
    keys: list[tuple[int, int]] = []
    for node, kind in enumerate(types):
        key = depth[node], kind
        if key not in batches:
            batches[key] = []
            insort(keys, key)
        batches[key].append(node)
    return [batches[key] for key in keys]


@functools.cache  # graphs are hashed by identity: the same ones are planned once, as by Penstock
def nodes_and_batches_by_depth(graphs: tuple[Any, ...]):
    """For each node its type, what it reads and its inputs; and the batches of all of them."""
    nodes: list[tuple[Hashable, list[int], list[torch.Tensor]]] = []
    for graph in graphs:
        first, seen = len(nodes), {}
        flat, starts = graph.nodes.flat.tolist(), graph.nodes.starts.tolist()
        for node, code in enumerate(graph.nodes.types.tolist()):
            place = seen[code] = seen.get(code, -1) + 1
            inputs = [each[place : place + 1] for each in graph.inputs.get(code, ())]
            reads = [first + read for read in flat[starts[node] : starts[node + 1]]]
            nodes.append((graph.signatures[code][0], reads, inputs))
    kinds = sorted({node[0] for node in nodes}, key=str)
    return nodes, by_depth([kinds.index(node[0]) for node in nodes], [node[1] for node in nodes])


def frame_step(cells: Any, graphs: Sequence[Any], kind: Hashable) -> torch.Tensor:
    """Outputs of all nodes of a type, depth by depth, states in tensors that hold all nodes."""
    nodes, batches = nodes_and_batches_by_depth(tuple(graphs))
    frames: list[torch.Tensor] = []
    results, numbers = [], []
    device = next(cells[kind].parameters()).device
    for batch in batches:
        rows = torch.tensor(batch, device=device)
        operands: list[Any] = []
        for slot in range(len(nodes[batch[0]][1])):
            read = [nodes[node][1][slot] for node in batch]
            index = torch.tensor(read, device=device)
            operands.append(tuple(frame.index_select(0, index) for frame in frames))
        given = zip(*(nodes[node][2] for node in batch), strict=True)
        inputs = [torch.cat(each).to(device) for each in given]
        result = cells[nodes[batch[0]][0]](*operands, *inputs)
        if isinstance(result, tuple):
            frames = frames or [part.new_zeros(len(nodes), part.shape[1]) for part in result]
            for frame, part in zip(frames, result, strict=True):
                frame[rows] = part
        if nodes[batch[0]][0] == kind:
            results.append(result)
            numbers += batch
    return torch.cat(results)[torch.tensor(numbers, device=device).argsort()]


def fold_step(cells: Any, graphs: Sequence[Any], kind: Hashable) -> torch.Tensor:
    """Outputs of all nodes of a type, depth by depth, operands concatenated node by node."""
    nodes, batches = nodes_and_batches_by_depth(tuple(graphs))
    values: list[Any] = [None] * len(nodes)
    device = next(cells[kind].parameters()).device
    for batch in batches:
        operands: list[Any] = []
        for slot in range(len(nodes[batch[0]][1])):
            given = [values[nodes[node][1][slot]] for node in batch]
            if isinstance(given[0], tuple):
                operands.append(tuple(torch.cat(each) for each in zip(*given, strict=True)))
            else:
                operands.append(torch.cat(given))
        given = zip(*(nodes[node][2] for node in batch), strict=True)
        inputs = [torch.cat(each).to(device) for each in given]
        result = cells[nodes[batch[0]][0]](*operands, *inputs)
        is_tuple = isinstance(result, tuple)
        parts = [each.split(1) for each in (result if is_tuple else (result,))]
        for node, row in zip(batch, zip(*parts, strict=True), strict=True):
            values[node] = row if is_tuple else row[0]
    return torch.cat([values[node] for node in range(len(nodes)) if nodes[node][0] == kind])
