"""Generated Python modules: found by tools that ask for source, never loaded from a file."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.codegen import load_module
from penstock.errors import BuildError

SOURCE = '"""A module."""\n\n\ndef answer():\n    return 42\n'


def test_the_source_of_a_function_is_found():
    module = load_module("answer", SOURCE)
    assert module.answer() == 42
    assert inspect.getsource(module.answer) == "def answer():\n    return 42\n"
    assert Path(inspect.getfile(module.answer)).read_text() == SOURCE
    assert sys.modules[module.__name__] is module


def test_the_same_text_is_executed_once():
    assert load_module("answer", SOURCE) is load_module("answer", SOURCE)
    other = load_module("answer", SOURCE.replace("42", "43"))
    assert (load_module("answer", SOURCE).answer(), other.answer()) == (42, 43)


def test_what_a_file_holds_is_never_executed(cache):
    text = SOURCE.replace("42", "1")
    directory = cache / "libraries"
    directory.mkdir(mode=0o700, parents=True)
    cache.chmod(0o700)
    program = (
        f"from penstock.codegen import load_module as m; print(m('answer', {text!r}).answer())"
    )

    def answer_of_another_process() -> str:
        return subprocess.run(
            [sys.executable, "-c", program],
            env={"PENSTOCK_CACHE_DIR": str(cache), "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert answer_of_another_process() == "1\n"
    (path,) = directory.glob("answer-*.py")
    path.write_text(text.replace("1", "2"))
    assert answer_of_another_process() == "1\n"
    assert path.read_text() == text
    assert [each.name for each in directory.iterdir()] == [path.name]


def test_a_directory_that_others_can_write_to_is_refused(cache):
    (cache / "libraries").mkdir(parents=True)
    cache.chmod(0o700)
    (cache / "libraries").chmod(0o777)
    with pytest.raises(BuildError, match="others can write to it"):
        load_module("answer", SOURCE)


def test_a_name_must_be_an_identifier():
    with pytest.raises(ValueError, match=r"name is '\.\./x', but must be an identifier"):
        load_module("../x", SOURCE)
