"""The import order of the package, read from the source: a room imports only from rooms below it.

units, errors, tables <- memory, codegen <- activations, unified, graph, rgnn, batching
  <- planner <- executor <- report <- integrations, cli

Imports inside functions and under TYPE_CHECKING count as well: they are dependencies all the same.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "penstock"

LAYERS = [
    {"units", "errors", "tables"},
    {"memory", "codegen"},
    {"activations", "unified", "graph", "rgnn", "batching"},
    {"planner"},
    {"executor"},
    {"report"},
    {
        "integrations",
        "cli",
        "demo",
        "env",
        "_launch",
        "_launch_modes",
        "_vector_math",
        "__main__",
    }
    | {"_cli_options", "_plan_command", "_plan_models", "_plan_run"},
]
# Rooms that know nothing of each other, although they lie side by side.
APART = {"activations", "unified", "rgnn", "batching"}
# Rooms that may not use everything below them, only the first layer and these.
ONLY = {
    "planner": {"graph", "memory", "codegen"},
    "executor": {"planner", "memory", "graph", "codegen"},
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


def module_name(path: Path) -> str:
    """The dotted name of a file below the package: "penstock.memory._ledger"."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST, *, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each penstock module that `tree` imports, however it is written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                # `from . import x` starts at the package itself, from a module at its parent.
                parents = module.split(".")[: None if is_package else -1]
                parents = parents[: len(parents) - (node.level - 1)]
                base = ".".join([*parents, *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            names = [str(node.args[0].value)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "penstock")


def room_of(module: str) -> str | None:
    """The room a dotted name lies in; None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def edges() -> list[tuple[str, str, str]]:
    """Each import between rooms as (source room, target room, "file:line: imported name")."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = module_name(path)
        source = room_of(module)
        if source is None:  # __init__.py only names what the rooms offer
            continue
        tree = ast.parse(path.read_text(), filename=str(path))
        is_package = path.name == "__init__.py"
        for line, name in imported_modules(tree, module=module, is_package=is_package):
            target = room_of(name)
            where = f"{path.relative_to(PACKAGE.parent)}:{line}: {name}"
            # `from penstock import offload` goes through the top; `__version__` lives there.
            if target is not None and target != "__version__":
                found.append((source, target, where))
    return found


def test_every_room_has_its_place():
    rooms = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" and path.stem != "__init__"
    }
    rooms |= {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms - set(LEVEL) == set(), "say in LAYERS where the room stands"


def test_imports_go_downward_only():
    wrong = [
        f"{where} (room {source} may not use {target})"
        for source, target, where in edges()
        if target not in LEVEL or not is_allowed(source, target)
    ]
    assert wrong == []


def test_rooms_do_not_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for source, target, _ in edges():
        if source != target:
            graph.setdefault(source, set()).add(target)
    finished: set[str] = set()

    def visit(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, f"circle: {' -> '.join([*path, room])}"
        if room in finished:
            return
        for target in sorted(graph.get(room, ())):
            visit(target, (*path, room))
        finished.add(room)

    for room in sorted(graph):
        visit(room, ())


def test_the_package_itself_imports_no_room_when_it_loads():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    at_load = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in at_load:
        assert isinstance(node, ast.ImportFrom)
        assert node.level == 0
        assert node.module in {"importlib", "typing"}


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
    seen = imported_modules(ast.parse(statement), module="penstock.memory._x", is_package=False)
    assert [name for _, name in seen] == [expected]
