"""The contract of the code cache: built once, found again, refused where others could write."""

import ctypes
import os
import shlex
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from penstock.codegen import build_library, find_compiler, load_library
from penstock.errors import BuildError

SOURCE = 'extern "C" int answer() { return 42; }\n'

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gains a line each time the compiler compiles (and none for `--version`)."""
    compiler, log = find_compiler(), tmp_path / "compilations"
    assert compiler is not None
    log.touch()
    wrapper = tmp_path / "logging-compiler"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = --version ] || {{ echo x >> {shlex.quote(str(log))}; sleep 0.3; }}\n'
        f'exec {compiler} "$@"\n'
    )
    wrapper.chmod(0o700)
    monkeypatch.setenv("CXX", str(wrapper))
    return log


def start_build() -> subprocess.Popen[str]:
    """Let another process build SOURCE and print the library's path."""
    program = f"from penstock.codegen import build_library as b; print(b('answer', {SOURCE!r}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    )


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@needs_compiler
def test_source_may_be_a_file_or_several(tmp_path):
    whole, begin, end = (tmp_path / name for name in ("answer.cpp", "begin.cpp", "end.cpp"))
    whole.write_text(SOURCE)
    begin.write_text(SOURCE[:20])
    end.write_text(SOURCE[20:])
    built = build_library("answer", SOURCE)
    assert build_library("answer", whole) == build_library("answer", [begin, end]) == built


@needs_compiler
def test_flags_reach_the_compiler_and_the_linker():
    source = '#include <cmath>\nextern "C" double f(double x) { return std::cos(x) + SHIFT; }\n'
    library = load_library("shifted", source, flags=["-DSHIFT=2", "-lm"])
    library.f.restype, library.f.argtypes = ctypes.c_double, [ctypes.c_double]
    assert library.f(0.0) == 3.0


@needs_compiler
def test_torch_headers_and_libc10_are_there_on_request():
    source = (
        "#include <c10/macros/Export.h>\n"  # a short one
        "namespace c10 { struct Allocator; C10_API Allocator* GetCPUAllocator(); }\n"
        'extern "C" bool has_allocator() { return c10::GetCPUAllocator() != nullptr; }\n'
    )
    library = load_library("with_torch", source, include_torch=True)
    library.has_allocator.restype = ctypes.c_bool
    assert library.has_allocator()
    with pytest.raises(BuildError, match=r"c10/macros/Export\.h"):
        build_library("with_torch", source)


@needs_compiler
def test_python_headers_are_there_on_request(tmp_path, monkeypatch):
    source = '#include <Python.h>\nextern "C" int version() { return PY_MINOR_VERSION; }\n'
    library = load_library("with_python", source, include_python=True)
    assert library.version() == sys.version_info.minor
    with pytest.raises(BuildError, match=r"Python\.h"):
        build_library("with_python", source)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(BuildError, match="apt install python3-dev"):
        build_library("with_python", source, include_python=True)


@needs_compiler
def test_second_build_does_not_compile(compilations):
    first = build_library("answer", SOURCE)
    assert build_library("answer", SOURCE) == first
    assert num_lines(compilations) == 1


@needs_compiler
def test_another_process_finds_the_library_in_the_cache(compilations):
    path = build_library("answer", SOURCE)
    printed, _ = start_build().communicate(timeout=120)
    assert printed.strip() == str(path)
    assert num_lines(compilations) == 1


@needs_compiler
def test_anything_different_is_another_library(compilations):
    paths = {
        build_library("answer", SOURCE),
        build_library("other", SOURCE),
        build_library("answer", SOURCE + "// changed\n"),
        build_library("answer", SOURCE, flags=["-O1"]),
        build_library("answer", SOURCE, flags=["-O1", "-march=native"]),
        build_library("answer", SOURCE, include_torch=True),
        build_library("answer", SOURCE, include_python=True),
    }
    assert len(paths) == num_lines(compilations) == 7


@needs_compiler
def test_processes_that_start_together_build_once(compilations):
    processes = [start_build() for _ in range(2)]
    printed = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(printed) == 1
    assert num_lines(compilations) == 1


@needs_compiler
def test_broken_source_shows_command_and_output(cache):
    with pytest.raises(BuildError) as caught:
        build_library("broken", 'extern "C" int f() { return undeclared_name; }')
    assert "undeclared_name" in str(caught.value)
    assert "-shared" in str(caught.value)
    left = {path.suffix for path in (cache / "libraries").iterdir()}
    assert left <= {".lock"}


@needs_compiler
def test_cache_is_private(cache):
    old_mask = os.umask(0)
    try:
        path = build_library("answer", SOURCE)
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("below", ["", "libraries"])
def test_directory_that_others_can_write_to_is_refused(cache, mode, below, monkeypatch):
    monkeypatch.setenv("CXX", "true")  # whether there is a compiler does not matter here
    (cache / "libraries").mkdir(parents=True, mode=0o700)
    (cache / below).chmod(mode)
    with pytest.raises(BuildError, match="others can write to it") as caught:
        build_library("answer", SOURCE)
    assert str(cache) in str(caught.value)
    assert "chmod 700" in str(caught.value)


def test_directory_of_another_user_is_refused(cache, monkeypatch):
    monkeypatch.setenv("CXX", "true")
    cache.mkdir(mode=0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(BuildError, match=f"belongs to user {user}"):
        build_library("answer", SOURCE)


def test_file_in_place_of_the_directory_is_an_error(cache, monkeypatch):
    monkeypatch.setenv("CXX", "true")
    cache.write_text("")
    with pytest.raises(BuildError, match="PENSTOCK_CACHE_DIR"):
        build_library("answer", SOURCE)


def test_no_compiler_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None
    with pytest.raises(BuildError, match=r"no C\+\+ compiler was found.*set CXX"):
        build_library("answer", SOURCE)


def test_missing_compiler_in_cxx_is_not_replaced_silently(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    assert find_compiler() is None
    with pytest.raises(BuildError, match="no-such-compiler"):
        build_library("answer", SOURCE)


@needs_compiler
def test_cxx_may_hold_arguments(monkeypatch):
    compiler = find_compiler()
    monkeypatch.setenv("CXX", f"env {compiler}")
    assert find_compiler() == f"env {compiler}"
    assert load_library("answer", SOURCE).answer() == 42


@pytest.mark.parametrize("name", ["", "../escape", "two words", "1st", "a/b"])
def test_name_must_be_an_identifier(name):
    with pytest.raises(ValueError, match="name is"):
        build_library(name, SOURCE)
