"""Libraries in this process: built, loaded, declared; or done without, and the log says so."""

import ctypes
import logging

import pytest

from penstock.codegen import (
    build_library,
    find_compiler,
    load_library,
    load_optional_library,
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
