"""`import penstock` is light: no third-party module, no process, no network, nothing written.

How long it takes is for `benchmarks/import_time.py` to say; a test on a shared machine cannot.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from fork_servers import find_python

SOURCE = Path(__file__).resolve().parent.parent / "src"

# Runs in a fresh interpreter: reports what one statement imported and what it did to the outside.
OBSERVER = """
import json, os, sys
before, seen = set(sys.modules), []
OUTSIDE = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
           "socket.", "ctypes.dlopen", "os.mkdir", "os.rename", "os.remove", "os.truncate",
           "shutil.", "tempfile.")

def watch(event, args):
    if event.startswith(OUTSIDE):
        seen.append(f"{event} {args!r}")
    if event == "open":
        path, mode, flags = args
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            seen.append(f"open for writing: {path!r}")

sys.addaudithook(watch)
STATEMENT
print(json.dumps({"modules": sorted(set(sys.modules) - before), "outside": seen}))
"""


def observe(statement: str, python: str = sys.executable) -> dict[str, list[str]]:
    """Run `statement` in a new process; what it loaded and what it did to the outside."""
    done = subprocess.run(
        [python, "-c", OBSERVER.replace("STATEMENT", statement)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def third_party(modules: list[str]) -> set[str]:
    """Top-level names that are neither Penstock nor Python's own."""
    roots = {name.partition(".")[0] for name in modules}
    return roots - set(sys.stdlib_module_names) - {"penstock"}


def test_import_loads_no_third_party_module():
    modules = observe("import penstock")["modules"]
    assert "penstock" in modules
    assert third_party(modules) == set()
    assert [name for name in modules if name.startswith("penstock.")] == [
        "penstock._lazy",
        "penstock._version",
    ]


def test_import_touches_nothing_outside():
    assert observe("import penstock")["outside"] == []


def test_observer_sees_what_it_looks_for():
    seen = observe("import numpy, subprocess; subprocess.run(['true']); open(os.devnull, 'w')")
    assert third_party(seen["modules"]) >= {"numpy"}
    assert any(event.startswith("subprocess.Popen") for event in seen["outside"])
    assert any(event.startswith("open for writing") for event in seen["outside"])


@pytest.mark.parametrize("package", ["units", "errors", "tables", "codegen"])
def test_light_packages_do_not_import_torch(package: str):
    assert "torch" not in third_party(observe(f"import penstock.{package}")["modules"])


def test_offload_does_not_import_the_command_line_or_pictures():
    loaded = third_party(
        observe("import penstock; penstock.offload", find_python("torch"))["modules"]
    )
    assert not loaded & {"typer", "matplotlib", "transformers", "accelerate", "IPython"}


@pytest.mark.parametrize("name", penstock.__all__)
def test_every_public_name_loads(name: str):
    assert getattr(penstock, name) is not None
    assert name in dir(penstock)


@pytest.mark.parametrize("name", ["codegen", "memory", "tables", "units"])
def test_the_floor_loads_but_is_not_offered(name: str):
    assert getattr(penstock, name) is not None
    assert name not in dir(penstock)


def test_public_names_are_sorted_and_unique():
    assert list(penstock.__all__) == sorted(set(penstock.__all__))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'offlaod'"):
        penstock.offlaod  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_version_matches_the_changelog():
    changelog = (SOURCE.parent / "CHANGELOG.md").read_text()
    headings = [line for line in changelog.splitlines() if line.startswith("## ")]
    assert headings[0].split()[1] == penstock.__version__
