"""The sources of the package, parsed once for all tests of what they say.

Trees of all files take hundreds of megabytes, and seconds to make and to walk. So a file is parsed
and walked when it is read, and what tests ask of it is kept, a few lines for each answer.
"""

from __future__ import annotations

import ast
import functools
import gc
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "penstock"
SUFFIXES = (".py", ".cpp", ".hpp", ".cu", ".h")

# fmt: off
FACTORIES_OF_FLOATS = {
    "empty", "empty_strided", "eye", "linspace", "logspace", "normal", "ones", "rand", "randn",
    "zeros",
}
FACTORIES = FACTORIES_OF_FLOATS | {
    "arange", "as_tensor", "full", "randint", "randperm", "sparse_coo_tensor", "sparse_csr_tensor",
    "tensor", "tril_indices", "triu_indices",
}
"""Functions of torch that make a tensor on the default device, or of the default dtype."""
# fmt: on

_PRIVATE = re.compile(r"torch(\.\w+)*\._[A-Za-z]")
_CPP_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)

Found = list[tuple[int, str]]
"""What is found, with its lines."""


@dataclass
class Source:
    """A file of the package, and what it says.

    Args:
        path: From the folder above the package: "penstock/memory/_ledger.py".
        text: What the file contains.
    """

    path: Path
    text: str
    docstrings: Found = field(default_factory=list)
    """Those of modules, classes, functions and, after an assignment, of attributes."""
    classes: Found = field(default_factory=list)
    functions: list[tuple[int, str, int]] = field(default_factory=list)
    """The line, name and number of lines of each."""
    variables: Found = field(default_factory=list)
    imports: Found = field(default_factory=list)
    """Dotted names of modules, and names in them, of this package."""
    private_names: list[str] = field(default_factory=list)
    """Names of torch, imported or looked up, that begin with an underscore."""
    implicit_tensors: Found = field(default_factory=list)
    """Calls that leave the device, or dtype, of a tensor to the default."""

    def __post_init__(self) -> None:
        if self.path.suffix == ".py":
            _Walk(self).run()

    @property
    def module(self) -> str:
        """The dotted name: "penstock.memory._ledger"."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    def at(self, line: int, what: str) -> str:
        return f"{self.path}:{line}: {what}"

    def comments(self) -> Iterator[tuple[int, str]]:
        if self.path.suffix == ".py":
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                if token.type == tokenize.COMMENT:
                    yield token.start[0], token.string
            return
        for match in _CPP_COMMENT.finditer(self.text):
            if not match[0].startswith('"'):
                yield self.text.count("\n", 0, match.start()) + 1, match[0]


@functools.cache
def read_package() -> list[Source]:
    """All files of the package, in their order.

    Looking for cycles among millions of new nodes takes as long as parsing does.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        paths = sorted(path for path in PACKAGE.rglob("*") if path.suffix in SUFFIXES)
        return [Source(path.relative_to(PACKAGE.parent), path.read_text()) for path in paths]
    finally:
        if is_enabled:
            gc.enable()


class _Walk:
    """A look at each node of a file, in the order of `ast.walk`."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.parents = source.module.split(".")
        if source.path.name != "__init__.py":
            self.parents.pop()
        self.held = set[int]()
        self.calls: list[ast.Call] = []
        self.looks: dict[type[ast.AST], Callable] = {
            ast.Module: self.look_at_body,
            ast.ClassDef: self.look_at_class,
            ast.FunctionDef: self.look_at_function,
            ast.AsyncFunctionDef: self.look_at_function,
            ast.arg: self.look_at_argument,
            ast.Name: self.look_at_name,
            ast.Attribute: self.look_at_attribute,
            ast.Import: self.look_at_import,
            ast.ImportFrom: self.look_at_import_from,
            ast.Call: self.look_at_call,
        }

    def run(self) -> None:
        nodes: list[ast.AST] = [ast.parse(self.source.text)]
        for node in nodes:  # to which children are appended
            if look := self.looks.get(node.__class__):
                look(node)
            for value in node.__dict__.values():
                if value.__class__ is list:
                    nodes += [each for each in value if isinstance(each, ast.AST)]
                elif isinstance(value, ast.AST) and value.__class__ not in (ast.Load, ast.Constant):
                    nodes.append(value)
        self.source.implicit_tensors += [
            (call.lineno, ast.unparse(call)[:80])
            for call in self.calls
            if id(call) not in self.held
        ]

    def look_at_body(self, node: ast.Module | ast.ClassDef | ast.FunctionDef) -> None:
        before = None
        for statement in node.body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if (
                isinstance(value, ast.Constant)
                and isinstance(value.value, str)
                and (before is None or isinstance(before, ast.Assign | ast.AnnAssign))
            ):
                self.source.docstrings.append((statement.lineno, value.value))
            before = statement

    def look_at_class(self, node: ast.ClassDef) -> None:
        self.look_at_body(node)
        self.source.classes.append((node.lineno, node.name))

    def look_at_function(self, node: ast.FunctionDef) -> None:
        self.look_at_body(node)
        assert node.end_lineno is not None
        num_lines = node.end_lineno - node.lineno + 1
        self.source.functions.append((node.lineno, node.name, num_lines))

    def look_at_argument(self, node: ast.arg) -> None:
        self.source.variables.append((node.lineno, node.arg))

    def look_at_name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.source.variables.append((node.lineno, node.id))

    def look_at_attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store):
            self.source.variables.append((node.lineno, node.attr))
        base: ast.AST = node
        while isinstance(base, ast.Attribute):
            base = base.value
        if isinstance(base, ast.Name) and base.id == "torch":
            self.add_private_names([ast.unparse(node)])

    def add_private_names(self, names: list[str]) -> None:
        self.source.private_names += [name for name in names if _PRIVATE.match(name)]

    def add_imports(self, line: int, names: list[str]) -> None:
        found = [(line, name) for name in names if name.split(".")[0] == "penstock"]
        self.source.imports += found

    def look_at_import(self, node: ast.Import) -> None:
        names = [alias.name for alias in node.names]
        self.add_imports(node.lineno, names)
        self.add_private_names(names)

    def look_at_import_from(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            # `from . import x` starts at the package itself, from a module at its parent.
            parents = self.parents[: len(self.parents) - (node.level - 1)]
            base = ".".join([*parents, *([base] if base else [])])
        names = [f"{base}.{alias.name}" for alias in node.names]
        self.add_imports(node.lineno, names)
        self.add_private_names(names)

    def look_at_call(self, node: ast.Call) -> None:
        function = node.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        first = node.args[0] if node.args else None
        if name.endswith("import_module") and isinstance(first, ast.Constant):
            self.add_imports(node.lineno, [str(first.value)])
        if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
            return
        match function.value.id, name:
            case ("nn", "Parameter") | ("self", "register_buffer"):
                # Parameters and buffers of layers have the default on purpose, as those of torch.
                self.held.update(map(id, node.args))
            case "torch", name if name in FACTORIES and not _is_given(node, name):
                self.calls.append(node)


def _is_given(call: ast.Call, name: str) -> bool:
    """Whether a call names the device, and the dtype where that depends on the default."""
    given = {keyword.arg for keyword in call.keywords}
    if None in given or "out" in given:  # keywords of a dictionary
        return True
    return "device" in given and ("dtype" in given or name not in FACTORIES_OF_FLOATS)
