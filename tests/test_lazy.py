"""Names that load on first use: those that type checkers are shown, and all that are public."""

import subprocess
from importlib import import_module
from pathlib import Path

import pytest

import penstock
from fork_servers import find_python

PACKAGE = Path(penstock.__file__).parent
# Those of Transformers import it themselves.
WITHOUT_DYNAMO = [
    ".".join(path.relative_to(PACKAGE.parent).parts[:-1])
    for path in sorted(PACKAGE.rglob("__init__.py"))
    if "transformers" not in path.parts
]
LAZY = [
    ".".join(path.relative_to(PACKAGE.parent).parts[:-1])
    for path in sorted(PACKAGE.rglob("__init__.py"))
    if "load_lazily(__name__)" in path.read_text()
]


def test_packages_that_load_lazily_are_found():
    assert {"penstock", "penstock.graph", "penstock.memory"} <= set(LAZY)


@pytest.mark.parametrize("name", LAZY)
def test_all_public_names_load(name):
    package = import_module(name)
    assert dir(package) == sorted(package.__all__)
    for each in package.__all__:
        value = getattr(package, each)
        assert vars(package)[each] is value  # the next time it is just there
        if hasattr(value, "__module__") and each[0] != "_":
            assert value.__module__.startswith("penstock."), each


@pytest.mark.parametrize("name", LAZY)
def test_a_name_that_is_not_there(name):
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nonsense'"):
        import_module(name).nonsense  # noqa: B018
    assert not hasattr(import_module(name), "_nonsense")


def test_everything_can_be_imported_at_once():
    program = "from penstock import *; print(plan.__module__, report.plan_table, StepGraph)"
    done = subprocess.run(
        [find_python("torch"), "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("penstock.partitioner")


def test_no_package_imports_the_compiler_of_torch():
    """Dynamo takes longer to import than torch itself."""
    program = f"import sys\nfor name in {WITHOUT_DYNAMO}:\n    __import__(name)\n"
    program += "    assert 'torch._dynamo' not in sys.modules, name\n"
    subprocess.run([find_python("torch"), "-c", program], check=True)
