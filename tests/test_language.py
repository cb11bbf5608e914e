"""The language of the sources: the rules of CONTRIBUTING that can be checked.

Summaries begin with a verb or a noun. Values and operators are things, not persons. A class name is
defined once in the library. Names that are half sentences stay away. Files and functions are short.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from package_sources import Source, read_package

REPOSITORY = Path(__file__).resolve().parents[1]

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
# fmt: on

SHARED_CLASS_NAMES: dict[str, str] = {}
"""Class names that two modules may define, each with the reason."""

MOST_PYTHON_LINES = 500
MOST_CPP_LINES = 700
MOST_FUNCTION_LINES = 40
MOST_LONG_FUNCTIONS = 0.02  # share of all functions


def names(source: Source) -> Iterator[tuple[int, str]]:
    """Names of functions, classes, the file and its folders."""
    for part in source.path.with_suffix("").parts[1:]:
        yield 1, part
    yield from source.classes
    yield from ((line, name) for line, name, _ in source.functions)


# The rules. Each returns what is wrong, as "file:line: text".


def riddles(sources: Iterable[Source]) -> list[str]:
    return [
        source.at(line, text.strip().split("\n")[0])
        for source in sources
        for line, text in source.docstrings
        if RIDDLES.match(text.strip())
    ]


def persons(sources: Iterable[Source]) -> list[str]:
    return [
        source.at(line, f"{found[0]!r} in {' '.join(text.split())[:80]!r}")
        for source in sources
        if PERSONS.search(source.text)  # few have one, and finding comments takes long
        for line, text in [*source.docstrings, *source.comments()]
        for found in PERSONS.finditer(text)
    ]


def repeated_classes(sources: Iterable[Source]) -> list[str]:
    homes: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for line, name in source.classes:
            homes[name.lstrip("_")].append(source.at(line, name))
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
            for each in [*defined, *source.variables]
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
        (num_lines, source.at(line, name))
        for source in sources
        for line, name, num_lines in source.functions
    ]
    over = sorted((each for each in found if each[0] > MOST_FUNCTION_LINES), reverse=True)
    is_allowed = len(over) <= MOST_LONG_FUNCTIONS * len(found)
    return [] if is_allowed else [f"{where} ({num_lines} lines)" for num_lines, where in over]


def implicit_defaults(sources: Iterable[Source]) -> list[str]:
    """Tensors whose device, or dtype, is the default one, which users change.

    Parameters and buffers of layers have it on purpose, as those of torch.
    """
    return [source.at(line, call) for source in sources for line, call in source.implicit_tensors]


RULES = [
    riddles,
    persons,
    repeated_classes,
    forbidden_names,
    long_files,
    long_functions,
    implicit_defaults,
]


@pytest.mark.parametrize("rule", RULES)
def test_the_sources_keep_the_rule(rule):
    assert rule(read_package()) == []


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
