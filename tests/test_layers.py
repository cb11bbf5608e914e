"""The import order of the package, read from the source: a room imports only from rooms below it.

compat, solvers, units, errors, tables, packages <- memory, codegen <- iomodel
  <- activations, unified, attention, ops, graph, rgnn, batching
  <- traversal, spectral, lora, kv <- planner
  <- partitioner <- executor <- report <- integrations <- cli, env

No modules import each other in a circle, and none imports a private module of another package.
Imports inside functions and under TYPE_CHECKING count as well: they are dependencies all the same.
"""

import ast
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from package_sources import PACKAGE, Source, read_package

LAYERS = [
    {"compat", "solvers", "units", "errors", "tables", "_lazy", "_version"},
    {"memory", "codegen"},
    {"iomodel"},
    {"activations", "unified", "attention", "ops", "graph", "rgnn", "batching"},
    {"traversal", "spectral", "lora", "kv"},
    {"planner"},
    {"partitioner"},
    {"executor"},
    {"report"},
    {"integrations"},
    {"cli", "env", "__main__"},
]
# Rooms that know nothing of each other, although they lie side by side.
APART = {"activations", "unified", "attention", "ops", "rgnn", "batching"}
# Rooms that may not use everything below them, only the first layer and these.
ONLY = {
    "attention": {"memory", "codegen", "iomodel"},
    "ops": {"codegen", "iomodel"},
    "traversal": {"batching", "codegen", "memory", "unified"},
    "spectral": {"memory", "codegen", "unified"},
    "lora": {"batching", "codegen", "iomodel"},
    "kv": {"memory", "codegen", "iomodel"},
    "planner": {"graph", "memory", "codegen"},
    "partitioner": {"planner", "graph", "memory"},
    "executor": {"partitioner", "planner", "memory", "graph", "codegen"},
}

LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def is_allowed(source: str, target: str) -> bool:
    """Whether code in room `source` may import from room `target`."""
    if source == target:
        return True
    if source in ONLY:
        return target in ONLY[source] or LEVEL[target] == 0
    if source in APART and target in APART:
        return False
    return LEVEL[target] <= LEVEL[source]


def room_of(module: str) -> str | None:
    """The room a dotted name lies in; None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


@functools.cache
def modules() -> set[str]:
    return {source.module for source in read_package() if source.path.suffix == ".py"}


def module_of(name: str) -> str:
    """The module that a dotted name lies in, or is: "penstock.units" for "penstock.units.x"."""
    while name not in modules():
        name = name.rpartition(".")[0]
    return name


@functools.cache
def imports() -> list[tuple[str, str, str]]:
    """Each import as (module, imported module, "file:line: imported name")."""
    return [
        (source.module, module_of(name), source.at(line, name))
        for source in read_package()
        if source.module != "penstock"  # only names what the rooms offer
        for line, name in source.imports
    ]


def edges() -> list[tuple[str, str, str]]:
    """Each import between rooms as (source room, target room, "file:line: imported name")."""
    return [
        (source, target, where)
        for module, imported, where in imports()
        if (source := room_of(module)) is not None and (target := room_of(imported)) is not None
    ]


def is_visible(module: str, target: str) -> bool:
    """Whether a module may see another: what is private is so outside of its package."""
    parts = target.split(".")
    private = [i for i, part in enumerate(parts) if part.startswith("_") and part != "__main__"]
    owner = parts[: private[0]] if private else []
    return module.split(".")[: len(owner)] == owner


def circle_in(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """The nodes of a circle in their order, the first one at both ends; empty if there is none."""
    finished: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for target in sorted(graph.get(path[-1], ())):
            if target in path:
                return [*path[path.index(target) :], target]
            if target not in finished and (found := search([*path, target])):
                return found
        finished.add(path[-1])
        return []

    return next((found for node in sorted(graph) if (found := search([node]))), [])


def graph_of(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """What each source leads to, without itself."""
    graph: dict[str, set[str]] = {}
    for source, target in pairs:
        if source != target:
            graph.setdefault(source, set()).add(target)
    return graph


def test_every_room_has_its_place():
    rooms = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" and path.stem != "__init__"
    }
    rooms |= {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms - set(LEVEL) == set(), "say in LAYERS where the room stands"


def test_contributors_are_shown_this_order():
    guide = (PACKAGE.parents[1] / "CONTRIBUTING.md").read_text()
    (shown,) = (block for block in guide.split("```") if "<-" in block)
    rooms = [{room.strip() for room in layer.split(",")} for layer in shown.split("<-")]
    assert rooms == [{room for room in layer if not room.startswith("_")} for layer in LAYERS]


def test_imports_go_downward_only():
    wrong = [
        f"{where} (room {source} may not use {target})"
        for source, target, where in edges()
        if target not in LEVEL or not is_allowed(source, target)
    ]
    assert wrong == []


def test_rooms_do_not_import_each_other_in_a_circle():
    assert circle_in(graph_of((source, target) for source, target, _ in edges())) == []


def test_modules_do_not_import_each_other_in_a_circle():
    assert circle_in(graph_of((module, target) for module, target, _ in imports())) == []


def test_private_modules_are_imported_within_their_package_only():
    assert [where for module, target, where in imports() if not is_visible(module, target)] == []


def test_the_package_itself_is_imported_from_the_top_only():
    wrong = [
        where
        for module, target, where in imports()
        if target == "penstock" and room_of(module) not in LAYERS[-1]
    ]
    assert wrong == []


def test_the_package_itself_imports_no_room_when_it_loads():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    at_load = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in at_load:
        assert isinstance(node, ast.ImportFrom)
        assert node.level == 0
        assert node.module in {"typing", "penstock._lazy", "penstock._version"}


@pytest.mark.parametrize(
    ("source", "target", "allowed"),
    [
        ("memory", "units", True),
        ("memory", "codegen", True),
        ("activations", "memory", True),
        ("cli", "activations", True),
        ("units", "memory", False),
        ("memory", "activations", False),
        ("activations", "unified", False),
        ("rgnn", "batching", False),
        ("traversal", "unified", True),
        ("unified", "traversal", False),
        ("spectral", "unified", True),
        ("spectral", "traversal", False),
        ("planner", "activations", False),
        ("executor", "planner", True),
        ("executor", "errors", True),
        ("report", "cli", False),
    ],
)
def test_the_rule_itself(source: str, target: str, allowed: bool):
    assert is_allowed(source, target) is allowed


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("import penstock.units", "penstock.units"),
        ("from penstock import units", "penstock.units"),
        ("from ..units import parse_bytes", "penstock.units.parse_bytes"),
        ("from . import _ledger", "penstock.memory._ledger"),
        ("from .. import units", "penstock.units"),
        ("def f():\n    from penstock.cli import main", "penstock.cli.main"),
        ("import importlib\nimportlib.import_module('penstock.cli')", "penstock.cli"),
    ],
)
def test_every_way_to_import_is_seen(statement: str, expected: str):
    seen = Source(Path("penstock/memory/_x.py"), statement).imports
    assert [name for _, name in seen] == [expected]


@pytest.mark.parametrize(
    ("module", "target", "expected"),
    [
        ("penstock.graph._run", "penstock.graph._alignment", True),
        ("penstock.planner.search._auto", "penstock.planner._plan", True),
        ("penstock.planner._api", "penstock.planner.search._auto", False),
        ("penstock.executor._fit", "penstock.graph.splitting._forms", False),
        ("penstock.executor._fit", "penstock.graph.encoding", True),
        ("penstock.cli", "penstock.cli._run", True),
        ("penstock.executor._fit", "penstock._version", True),
    ],
)
def test_what_is_private_is_seen_from_its_package_only(module: str, target: str, expected: bool):
    assert is_visible(module, target) is expected


def test_a_circle_is_found_where_it_is_planted():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": set[str](), "d": {"e"}}
    assert circle_in(graph) == []
    assert circle_in({**graph, "e": {"b"}}) == ["b", "d", "e", "b"]
    assert circle_in({"a": {"b"}, "b": {"a"}}) == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("penstock.units.parse_bytes", "penstock.units"),
        ("penstock.__version__", "penstock"),
        ("penstock", "penstock"),
        ("penstock.memory.Tier", "penstock.memory"),
    ],
)
def test_a_name_lies_in_the_longest_module_that_is_there(name: str, module: str):
    assert module_of(name) == module
