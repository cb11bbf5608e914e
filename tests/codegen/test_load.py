"""Libraries in this process: built, loaded, declared; or done without, and the log says so."""

import ctypes
import logging
import os
import subprocess
import sys

import pytest

from penstock.codegen import (
    build_library,
    find_compiler,
    load_library,
    load_optional_library,
    why_nothing_can_be_built,
)
from penstock.errors import BuildError

SOURCE = 'extern "C" int answer() { return 42; }\n'
HALF = 'extern "C" double half(double x) { return x / 2; }\n'

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


@needs_compiler
def test_text_becomes_a_loaded_library():
    assert load_library("answer", SOURCE).answer() == 42


@needs_compiler
def test_damaged_library_is_built_anew():
    path = build_library("answer", SOURCE)
    path.write_bytes(b"")
    assert load_library("answer", SOURCE).answer() == 42


@needs_compiler
def test_library_that_cannot_be_loaded_is_an_error():
    source = (
        'extern "C" int missing_function();\nextern "C" int f() { return missing_function(); }\n'
    )
    with pytest.raises(BuildError, match="missing_function"):
        load_library("incomplete", source, flags=["-Wl,-z,now"])


@needs_compiler
def test_functions_have_the_types_that_were_declared():
    functions = {"half": (ctypes.c_double, [ctypes.c_double])}
    assert load_library("half", HALF, functions=functions).half(3) == 1.5
    with pytest.raises(ctypes.ArgumentError):
        load_library("half", HALF, functions=functions).half("three")


@needs_compiler
def test_functions_that_take_objects_may_raise():
    source = (
        "#include <Python.h>\n"
        'extern "C" PyObject* twice(PyObject* x) { return PyNumber_Add(x, x); }\n'
    )
    functions = {"twice": (ctypes.py_object, [ctypes.py_object])}
    library = load_library("twice", source, include_python=True, functions=functions)
    assert library.twice("ab") == "abab"
    with pytest.raises(TypeError, match="NoneType"):
        library.twice(None)


@needs_compiler
def test_a_function_that_is_not_there_cannot_be_declared():
    with pytest.raises(AttributeError, match="third"):
        load_library("half", HALF, functions={"third": (None, [])})


@needs_compiler
def test_an_optional_library_is_taken_where_it_can_be_built(caplog):
    with caplog.at_level(logging.INFO, logger="penstock"):
        library = load_optional_library(
            "half",
            HALF,
            functions={"half": (ctypes.c_double, [ctypes.c_double])},
            work="numbers are halved",
            otherwise="by Python",
        )
    assert library is not None
    assert library.half(3) == 1.5
    assert "numbers are halved by C++" in caplog.text


def test_an_optional_library_is_done_without_where_there_is_no_compiler(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO, logger="penstock"):
        library = load_optional_library(
            "half", HALF, work="numbers are halved", otherwise="by Python"
        )
    assert library is None
    assert "numbers are halved by Python: the C++ compiler" in caplog.text
    assert "no-such-compiler" in caplog.text


@needs_compiler
@pytest.mark.parametrize("num_bytes", [0, 100, 3000, "half"])
def test_a_library_that_was_cut_short_is_built_anew_and_never_loaded(num_bytes):
    """The dynamic linker maps such a file, and the process dies where it reads beyond the end."""
    path = build_library("answer", SOURCE)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2 if num_bytes == "half" else num_bytes])
    program = (
        f"from penstock.codegen import load_library as l; print(l('answer', {SOURCE!r}).answer())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    assert path.stat().st_size == len(whole)


@needs_compiler
def test_a_library_with_a_flipped_bit_is_built_anew():
    path = build_library("answer", SOURCE)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert build_library("answer", SOURCE) == path
    path.with_suffix(".sha256").unlink()  # of a version that kept none, or half an installation
    assert load_library("answer", SOURCE).answer() == 42
    assert path.with_suffix(".sha256").exists()


@needs_compiler
def test_another_library_under_the_name_is_built_anew():
    path, other = build_library("half", HALF), build_library("answer", SOURCE)
    path.write_bytes(other.read_bytes())
    functions = {"half": (ctypes.c_double, [ctypes.c_double])}
    assert load_library("half", HALF, functions=functions).half(3) == 1.5


def test_without_a_compiler_or_a_cache_directory_nothing_can_be_built(monkeypatch, tmp_path):
    if find_compiler() is not None:
        assert why_nothing_can_be_built() is None
        occupied = tmp_path / "file"
        occupied.touch()
        monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(occupied))
        assert "set PENSTOCK_CACHE_DIR to" in (why_nothing_can_be_built() or "")
        monkeypatch.setenv("PENSTOCK_CACHE_DIR", "/proc/penstock")
        assert "set PENSTOCK_CACHE_DIR to" in (why_nothing_can_be_built() or "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in (why_nothing_can_be_built() or "")
