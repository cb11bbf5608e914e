"""The language of the sources: the rules of CONTRIBUTING that can be checked.

Summaries begin with a verb or a noun. Values and operators are things, not persons. A class name is
defined once in the library. Names that are half sentences stay away. Files and functions are short.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "src" / "penstock"

ROOMS: tuple[str, ...] | None = None
"""Paths below the package that are checked; None: all of it."""

PAGES = ("README.md", "CONTRIBUTING.md", "docs/guide/*.md", "docs/batching.md")
"""Patterns of the pages that are checked."""

RIDDLES = re.compile(r"(What|Where|Which|Whether|How|Who)\b")
PERSONS = re.compile(
    r"\b(whoever|whomever|whom|who|nobody|somebody|someone|everybody|everyone|anybody|anyone"
    r"|he|him|his|himself|she|her|hers)\b",
    re.IGNORECASE,
)

# Names that say less than the field's word does. The words are those of docs/glossary.md.
# fmt: off
FORBIDDEN_NAMES = {
    "alike", "apart", "eagers_branches", "emptiest", "fake_truth", "gathered", "gathering",
    "homeless", "in_a_circle", "in_the_way", "known_or_made", "let_go_of_unused",
    "looks_at_storages", "made", "no_collection", "nowhere", "of_cycle", "optima", "proofs",
    "small", "stand_in", "stand_ins", "stay", "stays", "unchanged", "understood", "unrandom",
    "where_they_were",
}
"""Names of functions, classes and files: phrases, bare participles and coined words."""
FORBIDDEN_PARTS = {
    "nobody", "roster", "seam", "seams", "somebody", "taste", "tastes", "toll", "tolls", "whoever",
}
"""Words of any name, of variables too."""

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

SHARED_CLASS_NAMES: dict[str, str] = {}
"""Class names that two modules may define, each with the reason."""

MOST_PYTHON_LINES = 500
MOST_CPP_LINES = 700
MOST_FUNCTION_LINES = 40
MOST_LONG_FUNCTIONS = 0.02  # share of all functions

_CPP_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


@dataclass
class Source:
    """A file of the library, read once."""

    path: Path
    text: str
    tree: ast.Module | None = field(default=None)

    def __post_init__(self) -> None:
        if self.path.suffix == ".py":
            self.tree = ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return [] if self.tree is None else list(ast.walk(self.tree))

    @property
    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        return (n for n in self.nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    def at(self, line: int, what: str) -> str:
        return f"{self.path}:{line}: {what}"


def read_sources() -> list[Source]:
    roots = [PACKAGE] if ROOMS is None else [PACKAGE / room for room in ROOMS]
    paths = {
        path
        for root in roots
        for path in ([root] if root.is_file() else root.rglob("*"))
        if path.suffix in (".py", ".cpp", ".hpp", ".cu", ".h")
    }
    return [Source(path.relative_to(PACKAGE.parent), path.read_text()) for path in sorted(paths)]


def docstrings(source: Source) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions and, after an assignment, of attributes."""
    for node in source.nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for before, statement in zip([None, *node.body[:-1]], node.body, strict=True):
            if before is not None and not isinstance(before, ast.Assign | ast.AnnAssign):
                continue
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def comments(source: Source) -> Iterator[tuple[int, str]]:
    if source.tree is not None:
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        return
    for match in _CPP_COMMENT.finditer(source.text):
        if not match[0].startswith('"'):
            yield source.text.count("\n", 0, match.start()) + 1, match[0]


def names(source: Source) -> Iterator[tuple[int, str]]:
    """Names of functions, classes, the file and its folders."""
    for part in source.path.with_suffix("").parts[1:]:
        yield 1, part
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def variables(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


# The rules. Each returns what is wrong, as "file:line: text".


def riddles(sources: Iterable[Source]) -> list[str]:
    return [
        source.at(line, text.strip().split("\n")[0])
        for source in sources
        for line, text in docstrings(source)
        if RIDDLES.match(text.strip())
    ]


def persons(sources: Iterable[Source]) -> list[str]:
    return [
        source.at(line, f"{found[0]!r} in {' '.join(text.split())[:80]!r}")
        for source in sources
        if PERSONS.search(source.text)  # few have one, and finding comments takes long
        for line, text in [*docstrings(source), *comments(source)]
        for found in PERSONS.finditer(text)
    ]


def repeated_classes(sources: Iterable[Source]) -> list[str]:
    homes: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(source.at(node.lineno, node.name))
    return [
        f"{name}: {', '.join(places)}"
        for name, places in sorted(homes.items())
        if len(places) > 1 and name not in SHARED_CLASS_NAMES
    ]


def forbidden_names(sources: Iterable[Source]) -> list[str]:
    def words_of(name: str) -> str:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_")

    found = []
    for source in sources:
        defined = list(names(source))
        found += [source.at(*each) for each in defined if words_of(each[1]) in FORBIDDEN_NAMES]
        found += [
            source.at(*each)
            for each in [*defined, *variables(source)]
            if not FORBIDDEN_PARTS.isdisjoint(words_of(each[1]).split("_"))
        ]
    return found


def long_files(sources: Iterable[Source]) -> list[str]:
    def limit(source: Source) -> int:
        return MOST_PYTHON_LINES if source.path.suffix == ".py" else MOST_CPP_LINES

    return [f"{s.path}: {s.num_lines} lines" for s in sources if s.num_lines > limit(s)]


def long_functions(sources: Iterable[Source]) -> list[str]:
    """The longest functions if there are too many over the limit."""
    found = [
        (f.end_lineno - f.lineno + 1, source.at(f.lineno, f.name))
        for source in sources
        for f in source.functions
        if f.end_lineno is not None
    ]
    over = sorted((each for each in found if each[0] > MOST_FUNCTION_LINES), reverse=True)
    is_allowed = len(over) <= MOST_LONG_FUNCTIONS * len(found)
    return [] if is_allowed else [f"{where} ({num_lines} lines)" for num_lines, where in over]


def implicit_defaults(sources: Iterable[Source]) -> list[str]:
    """Tensors whose device, or dtype, is the default one, which users change.

    Parameters and buffers of layers have it on purpose, as those of torch.
    """
    return [
        source.at(call.lineno, ast.unparse(call)[:80])
        for source in sources
        if "torch" in source.text
        for call in implicit_calls(source)
    ]


def implicit_calls(source: Source) -> Iterator[ast.Call]:
    calls = [node for node in source.nodes if isinstance(node, ast.Call)]
    held = {
        id(argument)
        for call in calls
        if _is_of(call, "nn", {"Parameter"}) or _is_of(call, "self", {"register_buffer"})
        for argument in call.args
    }
    for call in calls:
        given = {keyword.arg for keyword in call.keywords}
        is_whole = None in given or "out" in given  # keywords of a dictionary
        if is_whole or id(call) in held or not _is_of(call, "torch", FACTORIES):
            continue
        assert isinstance(call.func, ast.Attribute)
        needs_dtype = call.func.attr in FACTORIES_OF_FLOATS and "dtype" not in given
        if "device" not in given or needs_dtype:
            yield call


def _is_of(call: ast.Call, module: str, functions: Iterable[str]) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == module
        and function.attr in functions
    )


RULES = [
    riddles,
    persons,
    repeated_classes,
    forbidden_names,
    long_files,
    long_functions,
    implicit_defaults,
]


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    return read_sources()


@pytest.mark.parametrize("rule", RULES)
def test_the_sources_keep_the_rule(sources: list[Source], rule):
    assert rule(sources) == []


def test_pages_have_no_persons():
    pages = [page for pattern in PAGES for page in REPOSITORY.glob(pattern)]
    assert len(pages) >= len(PAGES)
    found = [
        f"{page.relative_to(REPOSITORY)}: {match[0]!r} in {line[:80]!r}"
        for page in pages
        for line in page.read_text().splitlines()
        for match in PERSONS.finditer(line)
    ]
    assert found == []


def planted(text: str, name: str = "penstock/graph/_planted.py") -> list[Source]:
    return [Source(Path(name), text)]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (riddles, '"""What a step takes."""\n'),
        (riddles, 'def f():\n    """Whether it fits."""\n'),
        (riddles, 'class C:\n    """Who reads it."""\n'),
        (riddles, 'class C:\n    field: int\n    """How many there are."""\n'),
        (persons, '"""A list that nobody reads."""\n'),
        (persons, "def f():\n    # whoever is there\n    pass\n"),
        (persons, 'def f():\n    """Return the value that somebody reads."""\n'),
        (persons, '"""The user and his tensors."""\n'),
        (repeated_classes, "class Plan:\n    pass\n\n\nclass _Plan:\n    pass\n"),
        (forbidden_names, "def _gathered():\n    pass\n"),
        (forbidden_names, "def let_go_of_unused():\n    pass\n"),
        (forbidden_names, "class SeamBinding:\n    pass\n"),
        (forbidden_names, "TOLL_BYTES = 1\n"),
        (forbidden_names, "def f(seam):\n    pass\n"),
        (forbidden_names, "class C:\n    def __init__(self):\n        self._roster = []\n"),
        (implicit_defaults, "x = torch.arange(3)\n"),
        (implicit_defaults, "x = torch.empty(3, device='cpu')\n"),
        (implicit_defaults, "x = torch.as_tensor(y)\n"),
        (long_files, "x = 1\n" * (MOST_PYTHON_LINES + 1)),
        (long_functions, "def f():\n" + "    x = 1\n" * MOST_FUNCTION_LINES),
    ],
)
def test_a_fault_is_found_where_it_is_planted(rule, text: str):
    assert len(rule(planted(text))) == 1


@pytest.mark.parametrize(
    "text", ["// who is read first\n", "int x;\n/* nobody\n   reads it */\n", "int x; // his\n"]
)
def test_persons_are_found_in_comments_of_cpp(text: str):
    assert len(persons(planted(text, "penstock/graph/planted.cpp"))) == 1


def test_long_files_of_cpp_are_found():
    text = "int x;\n" * (MOST_PYTHON_LINES + 1)
    assert long_files(planted(text, "penstock/a.cpp")) == []
    assert len(long_files(planted(text * 2, "penstock/a.cpp"))) == 1


def test_names_of_files_and_folders_count():
    assert len(forbidden_names(planted("x = 1\n", "penstock/executor/_seam.py"))) == 1
    assert len(forbidden_names(planted("x = 1\n", "penstock/planner/optima/_a.py"))) == 1


def test_what_is_right_passes():
    text = '''
"""Guards: assumptions of a captured step that are compared when it runs."""


class LiveRange:
    """The operators from a value's definition to its last use."""

    def contains(self, operator: int) -> bool:
        """Return whether an operator lies in the range."""
        message = "whoever"  # a string is no prose
        return bool(message)


weight = nn.Parameter(torch.empty(3))
offsets = torch.arange(3, device="cpu")
'''
    for rule in RULES:
        assert rule(planted(text)) == []
    assert persons(planted('const char* x = "who";\n', "penstock/a.cpp")) == []
