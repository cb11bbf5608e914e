"""`penstock env` answers whatever is broken, and says what."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fork_servers import find_python
from penstock import env, memory

SOURCE = Path(__file__).resolve().parent.parent / "src"


def ask(
    *, python: str = sys.executable, modules: Path | None = None, **variables: str
) -> dict[str, Any]:
    """The checks by name, from a process in which `modules` shadow the installed ones."""
    paths = [str(modules)] if modules else []
    done = subprocess.run(
        [python, "-m", "penstock.env", "--json"],
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join([*paths, str(SOURCE)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1)
    return {check["name"]: check for check in found["checks"]}


def only(check: Any) -> env.Finding:
    (found,) = check()
    return found


def test_whatever_must_be_installed_is_looked_at():
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    names = {re.split("[><=]", each)[0] for each in project["dependencies"]}
    assert names == {"torch", *env._REQUIRED}


def fake_torch(directory: Path, source: str) -> Path:
    (directory / "torch").mkdir()
    (directory / "torch" / "__init__.py").write_text(source)
    return directory


def test_everything_in_order(store: Path, monkeypatch: pytest.MonkeyPatch):
    checks = ask(python=find_python("torch"), PENSTOCK_STORE=str(store))
    names = ["penstock", "python", "torch", "numpy", "rich", "typer", "store"]
    version = str(env._version("torch"))
    if tuple(map(int, version.split(".")[:2])) > env._NEWEST_TESTED_TORCH:  # make test TORCH=newest
        assert checks["torch"]["status"] == "note" and "make test" in checks["torch"]["remedy"]
        names.remove("torch")
    for name in names:
        assert checks[name]["status"] == "ok", checks[name]
        assert checks[name]["remedy"] == ""
    for name in ("torch-geometric", "triton", "matplotlib"):  # there, or what it would be for
        installed = env._version(name)
        assert checks[name]["value"] == installed or "only for" in checks[name]["value"]
    assert checks["PENSTOCK_STORE"]["value"] == str(store)
    assert "torch internals" not in checks


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise ImportError('libc10.so: cannot open')", "libc10.so: cannot open"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("raise SystemExit(3)", "exit 3"),
    ],
)
def test_a_torch_that_does_not_import(source: str, expected: str, tmp_path: Path):
    checks = ask(modules=fake_torch(tmp_path, source))
    assert checks["torch"]["status"] == "broken"
    assert expected in checks["torch"]["value"]
    assert "pip install" in checks["torch"]["remedy"]
    assert "compiler" in checks  # and it went on


def test_packages_may_be_distributed_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    assert env._version("kvikio_of_a_test") is None
    about = tmp_path / "kvikio_of_a_test_cu13-26.2.dist-info"
    about.mkdir()
    name = "Name: kvikio-of-a-test-cu13"
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\n{name}\nVersion: 26.2\n")
    (about / "top_level.txt").write_text("kvikio_of_a_test\n")
    (tmp_path / "kvikio_of_a_test.py").touch()
    importlib.invalidate_caches()
    assert env._version("kvikio_of_a_test") == "26.2"


def torch_of(version: str, cuda: str | None = None) -> str:
    return (
        f"__version__ = {version!r}\nclass cuda:\n    is_available = lambda: False\n"
        f"    device_count = lambda: 0\nclass version:\n    cuda = {cuda!r}\n"
        "def get_num_threads():\n    return 2\n"
    )


def test_an_old_torch(tmp_path: Path):
    checks = ask(modules=fake_torch(tmp_path, torch_of("2.4.1+cu121", "12.1")))
    assert checks["torch"]["status"] == "broken"
    assert "2.11" in checks["torch"]["remedy"]
    assert checks["gpu"]["status"] == "note"


def test_a_torch_that_is_newer_than_the_tests_and_lacks_what_penstock_uses(tmp_path: Path):
    checks = ask(modules=fake_torch(tmp_path, torch_of("2.99.0+cu130")))
    assert checks["torch"]["status"] == "note"
    assert "`make test TORCH=2.99.0`" in checks["torch"]["remedy"]
    assert checks["torch internals"]["status"] == "broken"
    assert "2.99.0+cu130 has no torch." in checks["torch internals"]["value"]


@pytest.mark.parametrize(
    ("version", "fault"), [("2.11.0", "shards lie in turns"), ("2.14.1", "fork"), ("2.13.0", "")]
)
def test_faults_of_a_tested_torch_are_said(version: str, fault: str, tmp_path: Path):
    checks = ask(modules=fake_torch(tmp_path, torch_of(version)))
    assert checks["torch"]["status"] == "ok"
    found = checks.get("torch faults")
    assert (found is None) == (not fault)
    assert found is None or (fault in found["value"] and found["status"] == "note")


def test_a_compiler_that_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert only(env._check_compiler).status == "broken"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    check = only(env._check_compiler)
    assert check.status == "note"
    assert "g++" in check.remedy


def test_a_python_without_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(env.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    check = only(env._check_headers)
    assert check.status == "note" and str(tmp_path) in check.value
    assert "python3-dev" in check.remedy
    (tmp_path / "Python.h").touch()
    assert not list(env._check_headers())


def test_a_compiler_that_cannot_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'no headers here' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    check = only(env._check_compiler)
    assert check.status == "broken"
    assert "no headers here" in check.value


def test_a_cache_directory_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert only(env._check_cache).status == "ok"
    (tmp_path / "new").touch()
    check = only(env._check_cache)
    assert check.status == "broken"
    assert "not a directory" in check.value
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(shared))
    check = only(env._check_cache)
    assert check.status == "broken"
    assert "chmod 700" in check.remedy


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_directory_without_write_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    assert "not writable" in only(env._check_cache).value
    tmp_path.chmod(0o700)


def test_stores(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)
    assert only(env._check_store).status == "note"
    monkeypatch.setenv("PENSTOCK_STORE", "/nowhere")
    assert only(env._check_store).status == "broken"
    monkeypatch.setenv("PENSTOCK_STORE", str(store))
    assert only(env._check_store).status == "ok"
    monkeypatch.setattr(memory, "filesystem_type", lambda path: "tmpfs")
    check = only(env._check_store)
    assert check.status == "note"
    assert "RAM" in check.value


def test_a_check_that_fails_is_an_answer_too(monkeypatch: pytest.MonkeyPatch):
    def fail():
        raise RuntimeError("not even this")

    monkeypatch.setattr(env, "_check_torch", fail)
    monkeypatch.setattr(env, "_check_machine", fail)
    broken = [check for check in env.collect_checks() if check.name in ("torch", "machine")]
    assert [check.status for check in broken] == ["broken", "broken"]
    assert "not even this" in broken[0].value
    assert env.to_dict(broken)["ok"] is False


def test_as_text(monkeypatch: pytest.MonkeyPatch, capsys):
    checks = [
        env.Finding(name="python", status="ok", value="3.11"),
        env.Finding(name="torch", status="broken", value="is not installed", remedy="Install it."),
    ]
    monkeypatch.setattr(env, "collect_checks", lambda: iter(checks))
    assert env.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "python", "3.11"]
    assert lines[1].startswith("BROKEN  torch")
    assert lines[2].strip() == "-> Install it."
    assert lines[-1] == "1 broken: see above."


def test_only_our_variables_are_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("PENSTOCK_STORE", "y")
    names = [check.name for check in env._check_variables()]
    assert "PENSTOCK_STORE" in names
    assert "SECRET_TOKEN" not in names
