"""Plans with one fault, of many kinds, most of them next to a right plan.

    PYTHONPATH=src:tests/planner python -m mutants 20000

compares `check` with the replay of bytes on so many and prints what each kind came to.
"""

import contextlib
import dataclasses
import random
import sys
from collections import Counter

from byte_replay import judge
from graph_cases import machine, random_graph, random_plan
from penstock.errors import InfeasibleError, PlanError
from penstock.graph import StepGraph
from penstock.memory import Link, Tier
from penstock.planner import Copy, Plan, check, plan, simulate


def _one(items, rng, change):
    """Items with a random one replaced by what `change` makes of it (a list)."""
    if not items:
        return items
    at = rng.randrange(len(items))
    return (*items[:at], *change(items[at]), *items[at + 1 :])


def _edit(name, change):
    """A mutation of one of the plan's placements, transfers or copies."""

    def mutate(graph, plan, rng):
        items = _one(getattr(plan, name), rng, lambda item: change(item, graph, plan, rng))
        return dataclasses.replace(plan, **{name: items})

    return mutate


def _shift(name, *fields, by):
    def change(item, graph, plan, rng):
        step = rng.choice(by)
        return [item._replace(**{field: getattr(item, field) + step for field in fields})]

    return _edit(name, change)


def _swap(name, *fields):
    """A mutation that exchanges fields of two items; without fields, their places in the list."""

    def mutate(graph, plan, rng):
        items = list(getattr(plan, name))
        if len(items) > 1:
            a, b = rng.sample(range(len(items)), 2)
            first, second = items[a], items[b]
            if not fields:
                items[a], items[b] = second, first
            else:
                items[a] = first._replace(**{f: getattr(second, f) for f in fields})
                items[b] = second._replace(**{f: getattr(first, f) for f in fields})
        return dataclasses.replace(plan, **{name: tuple(items)})

    return mutate


def _other_value(item, graph, plan, rng):
    value = rng.randrange(len(graph.storage_of_value))
    return [item._replace(value=value, num_bytes=graph.num_bytes(value))]


def _other_version(item, graph, plan, rng):
    storage = graph.storage_of_value[item.value]
    same = [v for v, s in enumerate(graph.storage_of_value) if s == storage]
    return [item._replace(value=rng.choice(same))]


def _at_address_of_another(item, graph, plan, rng):
    return [item._replace(offset=rng.choice(plan.placements).offset)]


def _cut_in_two(item, graph, plan, rng):
    if item.end - item.start < 2:
        return [item]
    at = rng.randrange(item.start + 1, item.end)
    return [item._replace(end=at), item._replace(start=at % len(plan.order))]


def _around(item, graph, plan, rng):
    return [item._replace(end=item.end + len(plan.order))]


def _whole_step(item, graph, plan, rng):
    return [item._replace(start=0, end=len(plan.order))]


def _other_link(item, graph, plan, rng):
    return [item._replace(link=rng.choice(list(Link)))]


def _other_tier(item, graph, plan, rng):
    return [item._replace(tier=Tier.FILE if item.tier is Tier.HOST else Tier.HOST)]


def _resident(graph, plan, rng, *, own_address):
    """A storage lies on the device for ever, and nothing of it moves."""
    storages = [i for i, s in enumerate(graph.storages) if s.persistent and s.num_bytes]
    if not storages:
        return plan
    chosen = rng.choice(storages)
    value, num_bytes = graph.storages[chosen].initial, graph.storages[chosen].num_bytes

    def others(items):
        return [item for item in items if graph.storage_of_value[item.value] != chosen]

    offset = plan.arena_bytes
    if not own_address and plan.placements:
        offset = rng.choice(plan.placements).offset + rng.choice([-1, 0, 0, 1])
    if graph.storages[chosen].final == value:
        kept = others(plan.placements)
        found = next((p for p in plan.placements if p.value == value), None)
        cls = type(plan.placements[0]) if plan.placements else None
        if cls is None:
            return plan
        whole = cls(value, offset, num_bytes, 0, len(plan.order))
        placements = (*kept, whole) if found is None else (*kept, found._replace(**whole._asdict()))
    else:  # what a step changes stays at one address
        placements = tuple(
            p._replace(offset=offset) if graph.storage_of_value[p.value] == chosen else p
            for p in plan.placements
        )
        return dataclasses.replace(plan, placements=placements)
    return dataclasses.replace(
        plan,
        placements=placements,
        transfers=tuple(others(plan.transfers)),
        copies=tuple(others(plan.copies)),
    )


def _all_resident(graph, plan, rng):
    """All that no step changes lies on the device for ever, two of them at one address."""
    first = _resident(graph, plan, rng, own_address=True)
    return _resident(graph, first, rng, own_address=False)


def _lasting_over_another(graph, plan, rng):
    """What lives over the end of a step lies where something else does."""
    count = len(plan.order)
    lasting = [i for i, p in enumerate(plan.placements) if p.end >= count]
    if not lasting:
        return plan
    placements = list(plan.placements)
    at = rng.choice(lasting)
    placements[at] = placements[at]._replace(offset=rng.choice(plan.placements).offset)
    return dataclasses.replace(plan, placements=tuple(placements))


def _storage_elsewhere(graph, plan, rng):
    """All of a storage moves by as many bytes."""
    if not plan.placements:
        return plan
    storage = graph.storage_of_value[rng.choice(plan.placements).value]
    by = rng.choice([-4, -1, 1, 4, plan.arena_bytes])
    return dataclasses.replace(
        plan,
        placements=tuple(
            p._replace(offset=p.offset + by) if graph.storage_of_value[p.value] == storage else p
            for p in plan.placements
        ),
    )


def _never_moves(graph, plan, rng):
    """Neither transfers nor copies of a value, as if it stayed; its placements are as they were."""
    if not plan.transfers:
        return plan
    value = rng.choice(plan.transfers).value
    return dataclasses.replace(
        plan,
        transfers=tuple(t for t in plan.transfers if t.value != value),
        copies=tuple(c for c in plan.copies if c.value != value),
    )


def _joined(graph, plan, rng):
    """Two placements of a value become one, and what came in between does not come."""
    seen: dict[int, int] = {}
    for at, p in enumerate(plan.placements):
        if p.value in seen:
            first = plan.placements[seen[p.value]]
            rest = [x for x in plan.placements if x not in (first, p)]
            start, end = min(first.start, p.start), max(first.end, p.end)
            joined = first._replace(start=start, end=end)
            moves = [t for t in plan.transfers if (t.value, t.start) != (p.value, p.start)]
            return dataclasses.replace(plan, placements=(*rest, joined), transfers=tuple(moves))
        seen[p.value] = at
    return plan


def _another_copy(graph, plan, rng):
    value = rng.randrange(len(graph.storage_of_value))
    start = rng.randrange(len(plan.order))
    end = start + rng.randint(1, len(plan.order))
    copy = Copy(value, rng.choice([Tier.HOST, Tier.FILE]), graph.num_bytes(value), start, end)
    return dataclasses.replace(plan, copies=(*plan.copies, copy))


def _order(change):
    def mutate(graph, plan, rng):
        order = list(plan.order)
        change(order, rng)
        return dataclasses.replace(plan, order=tuple(order))

    return mutate


def _swap_neighbours(order, rng):
    if len(order) > 1:
        at = rng.randrange(len(order) - 1)
        order[at : at + 2] = order[at + 1], order[at]


def _swap_any(order, rng):
    a, b = rng.randrange(len(order)), rng.randrange(len(order))
    order[a], order[b] = order[b], order[a]


def _tight(name, used, by):
    def mutate(graph, plan, rng):
        budget = dataclasses.replace(plan.budget, **{name: max(0, used(plan) + by)})
        return dataclasses.replace(plan, budget=budget)

    return mutate


def _pair_later(graph, plan, rng):
    """A transfer and the placement or copy that it begins are later or earlier together."""
    if not plan.transfers:
        return plan
    t, by = rng.choice(plan.transfers), rng.choice([-1, 1])

    def moved(items):
        return tuple(
            item._replace(start=item.start + by)
            if (item.value, item.start) == (t.value, t.start)
            else item
            for item in items
        )

    return dataclasses.replace(
        plan,
        transfers=moved(plan.transfers),
        placements=moved(plan.placements),
        copies=moved(plan.copies),
    )


def _leaves_later(graph, plan, rng):
    """A transfer ends with the place that it empties, both a boundary later or earlier."""
    out = [t for t in plan.transfers if t.link.source is Tier.DEVICE]
    if not out:
        return plan
    t, by = rng.choice(out), rng.choice([-1, 1])

    def moved(items):
        return tuple(
            item._replace(end=item.end + by) if (item.value, item.end) == (t.value, t.end) else item
            for item in items
        )

    return dataclasses.replace(
        plan, transfers=moved(plan.transfers), placements=moved(plan.placements)
    )


_NEAR, _FAR = (-1, 1), (-3, -2, 2, 3)
KINDS = {
    "placement a byte elsewhere": _shift("placements", "offset", by=_NEAR),
    "placement far away": _shift("placements", "offset", by=(-16, -8, -4, 4, 8, 16)),
    "placement at another's address": _edit("placements", _at_address_of_another),
    "placement below the arena": _shift("placements", "offset", by=(-1000,)),
    "two placements change addresses": _swap("placements", "offset"),
    "a storage elsewhere": _storage_elsewhere,
    "placement begins elsewhere": _shift("placements", "start", by=_NEAR),
    "placement begins far away": _shift("placements", "start", by=_FAR),
    "placement ends elsewhere": _shift("placements", "end", by=_NEAR),
    "placement ends far away": _shift("placements", "end", by=_FAR),
    "placement later": _shift("placements", "start", "end", by=_NEAR),
    "placement a step longer": _edit("placements", _around),
    "placement for the whole step": _edit("placements", _whole_step),
    "placement missing": _edit("placements", lambda *_: []),
    "placement twice": _edit("placements", lambda item, *_: [item, item]),
    "placement cut in two": _edit("placements", _cut_in_two),
    "two placements joined": _joined,
    "placement of another value": _edit("placements", _other_value),
    "placement of another version": _edit("placements", _other_version),
    "placement with other bytes": _shift("placements", "num_bytes", by=_NEAR),
    "resident for ever, own address": lambda *a: _resident(*a, own_address=True),
    "resident for ever, another's address": lambda *a: _resident(*a, own_address=False),
    "two resident for ever": _all_resident,
    "lasting over another": _lasting_over_another,
    "transfer missing": _edit("transfers", lambda *_: []),
    "transfer twice": _edit("transfers", lambda item, *_: [item, item]),
    "transfer begins elsewhere": _shift("transfers", "start", by=_NEAR),
    "transfer ends elsewhere": _shift("transfers", "end", by=_NEAR),
    "transfer later": _shift("transfers", "start", "end", by=(*_NEAR, *_FAR)),
    "transfer by another link": _edit("transfers", _other_link),
    "transfer of another value": _edit("transfers", _other_value),
    "transfer of another version": _edit("transfers", _other_version),
    "half a transfer": _shift("transfers", "num_bytes", by=_NEAR),
    "two transfers change queue": _swap("transfers"),
    "two transfers change windows": _swap("transfers", "start", "end"),
    "transfer and its place later": _pair_later,
    "place emptied later": _leaves_later,
    "a value never moves": _never_moves,
    "copy missing": _edit("copies", lambda *_: []),
    "copy twice": _edit("copies", lambda item, *_: [item, item]),
    "copy begins elsewhere": _shift("copies", "start", by=_NEAR),
    "copy ends elsewhere": _shift("copies", "end", by=(*_NEAR, *_FAR)),
    "copy for the whole step": _edit("copies", _whole_step),
    "copy on another tier": _edit("copies", _other_tier),
    "copy of another value": _edit("copies", _other_value),
    "copy of another version": _edit("copies", _other_version),
    "one more copy": _another_copy,
    "neighbours change places": _order(_swap_neighbours),
    "two operators change places": _order(_swap_any),
    "operator missing": _order(lambda order, rng: order.pop(rng.randrange(len(order)))),
    "operator runs again": _order(
        lambda order, rng: order.insert(rng.randrange(len(order) + 1), rng.choice(order))
    ),
    "device budget just right": _tight("device_bytes", lambda p: p.peak_device_bytes, 0),
    "device budget too small": _tight("device_bytes", lambda p: p.peak_device_bytes, -1),
    "host budget just right": _tight("host_bytes", lambda p: p.peak_host_bytes, 0),
    "host budget too small": _tight("host_bytes", lambda p: p.peak_host_bytes, -1),
    "another workspace": lambda graph, plan, rng: dataclasses.replace(
        plan, workspace_bytes=plan.workspace_bytes + rng.choice(_NEAR)
    ),
}


def mutant(graph: StepGraph, right: Plan, kind: str, rng: random.Random) -> Plan:
    """The plan with a fault of a kind, now and then with a second one; its times are its own."""
    wrong = KINDS[kind](graph, right, rng)
    if rng.random() < 0.15:
        with contextlib.suppress(IndexError, ValueError):  # nothing is left to be changed
            wrong = KINDS[rng.choice(list(KINDS))](graph, wrong, rng)
    try:
        seconds = simulate(graph, wrong).step_seconds
        return dataclasses.replace(wrong, step_seconds=seconds)
    except Exception:  # what cannot be timed is wrong for another reason
        return wrong


def right_plan(seed: int) -> tuple[StepGraph, Plan]:
    """A random graph, and a random plan for it or, now and then, one of the planner's."""
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(1, 8))
    if seed % 16 == 0:
        fast = machine(out=2.0, back=3.0)
        seconds = [float(rng.randint(0, 6)) for _ in graph.operators]
        operators = zip(graph.operators, seconds, strict=True)
        graph = dataclasses.replace(
            graph, operators=tuple(dataclasses.replace(o, seconds=s) for o, s in operators)
        )
        roomy = plan(graph, machine=fast, time_limit=0.05)
        budget = roomy.peak_device_bytes * rng.randint(5, 9) // 10
        try:
            return graph, plan(
                graph, device_memory=budget, host_memory=1 << 20, machine=fast, time_limit=0.1
            )
        except InfeasibleError:
            return graph, roomy
    return graph, random_plan(graph, rng, keep=rng.choice([0.1, 0.3, 0.5, 0.8]))


def verdicts(graph: StepGraph, plan: Plan) -> tuple[str | None, str | None]:
    """What `check` and the replay of bytes have against a plan; None: nothing."""
    try:
        check(graph, plan)
        found = None
    except PlanError as error:
        found = error.rule
    return found, judge(graph, plan)


def compared(num_mutants: int) -> tuple[dict[str, Counter], list]:
    """Count verdicts by kind, and list what the two judges do not agree about."""
    counts = {kind: Counter() for kind in KINDS}
    disagreements = []
    kinds = list(KINDS)
    for index in range(num_mutants):
        seed = index // len(kinds)
        kind = kinds[index % len(kinds)]
        if index % len(kinds) == 0:
            graph, right = right_plan(seed)
            if any(verdicts(graph, right)):
                disagreements.append((seed, "right", *verdicts(graph, right)))
        rng = random.Random(index)
        try:
            wrong = mutant(graph, right, kind, rng)
        except IndexError:
            continue
        if wrong == right:
            counts[kind]["unchanged"] += 1
            continue
        found, judged = verdicts(graph, wrong)
        counts[kind]["right" if judged is None else "wrong"] += 1
        if (found is None) != (judged is None):
            disagreements.append((seed, index, kind, found, judged))
    return counts, disagreements


if __name__ == "__main__":
    counts, disagreements = compared(int(sys.argv[1]))
    for kind, count in counts.items():
        sys.stdout.write(f"{kind:40}" + "".join(f" {n:6} {what}" for what, n in count.items()))
        sys.stdout.write("\n")
    total = sum(counts.values(), Counter())
    sys.stdout.write(f"{len(counts)} kinds, {dict(total)}, {len(disagreements)} disagreements\n")
    for each in disagreements[:20]:
        sys.stdout.write(f"{each}\n")
