"""Programs with libraries imported do what `python` does; what they cannot do, it does itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fork_servers import LIBRARIES, WHOLE_END, ForkServers, find_python

pytestmark = pytest.mark.skipif(
    find_python("torch") == sys.executable, reason="no fork server runs here"
)

SCRIPT = """
import json, os, pathlib, signal, sys, threading
import helper
class Thing:
    pass
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": globals().get("__file__"),
    "package": __package__, "spec": __spec__ and __spec__.name, "same": main.__dict__ is globals(),
    "directory": os.getcwd(), "given": os.environ["GIVEN"], "umask": os.umask(0),
    "module": Thing.__module__, "warnings": sys.warnoptions, "bytecode": sys.dont_write_bytecode,
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "threads": threading.active_count(), "descriptors": sorted(os.listdir("/proc/self/fd"))[:5],
}))
"""
CASES = [
    ["about.py", "--epochs", "3", "-m"],
    ["-W", "ignore", "-Wdefault", "about.py"],
    ["-B", "-m", "about", "-x"],
    ["-m", "package", "x"],
    ["-c", SCRIPT, "y"],
    ["link.py"],
    ["folder", "x"],
    ["-I", "-c", "import sys; print(sys.flags.isolated)"],
]
ENDS = [
    "raise ValueError('no luck')",
    "import sys; sys.exit(7)",
    "raise SystemExit('last word')",
    "raise KeyboardInterrupt",
    "import os; os.abort()",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "import atexit; atexit.register(print, 'at the end')",
    "import threading; threading.Timer(0.1, print, ['from a thread']).start()",
    "x = (",
    "class Last:\n    def __del__(self): print('gone')\nlast = [Last()]; last.append(last)",
    "import sys; sys.excepthook = lambda *error: print(*error[:2]); 1 / 0",
]


def run(python: str, arguments: list[str], folder: Path, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python, *arguments],
        cwd=folder,
        env=os.environ | {"GIVEN": "yes", "PYTHONPATH": f"{folder}/library"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        **options,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("package", "folder", "library"):
        (tmp_path / name).mkdir()
    for path in ("about.py", "package/__main__.py", "folder/__main__.py"):
        (tmp_path / path).write_text(SCRIPT)
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "library/helper.py").touch()
    (tmp_path / "link.py").symlink_to(tmp_path / "folder/__main__.py")
    return tmp_path


@pytest.mark.parametrize("arguments", CASES, ids=lambda each: " ".join(each)[:20])
def test_a_script_sees_what_it_sees_under_python(arguments, folder):
    ours, pythons = (
        run(each, arguments, folder) for each in (find_python("torch"), sys.executable)
    )
    assert (ours.stdout, ours.stderr) == (pythons.stdout, pythons.stderr)
    assert ours.returncode == pythons.returncode == 0


@pytest.mark.parametrize("code", ENDS)
def test_a_script_ends_as_under_python(code, folder, monkeypatch):
    (folder / "end.py").write_text(f"def end():\n    exec({code!r})\n\nend()\n")
    for arguments, environment in ((["-c", code], {}), (["end.py"], WHOLE_END)):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        ours, pythons = (
            run(each, arguments, folder) for each in (find_python("torch"), sys.executable)
        )
        assert (ours.returncode, ours.stdout) == (pythons.returncode, pythons.stdout)
        assert ours.stderr == pythons.stderr


def test_torch_is_there_already(folder):
    code = "import sys; print('torch' in sys.modules, any('penstock' in n for n in sys.modules))"
    assert run(find_python("torch"), ["-c", code], folder).stdout == "True False\n"
    code = "import sys; print({'transformers', 'peft', 'torch_geometric'} <= set(sys.modules))"
    assert run(find_python("libraries"), ["-c", code], folder).stdout == "True\n"


def test_files_of_modules_are_known(folder):
    names = LIBRARIES["libraries"]
    code = f"import inspect; print(inspect._filesbymodname.keys() >= {set(names)})"
    assert run(find_python("libraries"), ["-c", code], folder).stdout == "True\n"


def test_input_and_other_open_files_are_the_programs(folder):
    reader, writer = os.pipe()
    code = f"import os, sys; os.write({writer}, sys.stdin.read().encode())"
    run(find_python("torch"), ["-c", code], folder, input="hello", pass_fds=[writer])
    os.close(writer)
    assert os.read(reader, 100) == b"hello"
    assert os.read(reader, 100) == b""  # no copy of it is left open
    os.close(reader)


TORCH_WATCHED = """
import os, torch
class Told:
    def __del__(self, write=os.write):
        write(1, b"taken apart")
torch.told = Told()
"""


def test_libraries_are_taken_apart_at_the_end_where_that_is_asked_for(folder, monkeypatch):
    """Python's modules and C++'s static objects; a Python of Linux has no other sign of those."""
    assert run(find_python("torch"), ["-c", TORCH_WATCHED], folder).stdout == ""
    for name, value in WHOLE_END.items():
        monkeypatch.setenv(name, value)
    assert run(find_python("torch"), ["-c", TORCH_WATCHED], folder).stdout == "taken apart"


WAIT = """
import os, sys, time
try:
    print(os.getpid(), flush=True)
    while True:
        time.sleep(0.1)
finally:
    print("on the way out", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_process(number):
    with subprocess.Popen(
        [find_python("torch"), "-c", WAIT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert child != process.pid
        process.send_signal(number)
        said = process.stdout.read()  # until both are gone
    assert process.returncode == -number
    assert ("on the way out" in said) is (number == signal.SIGINT)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline, "the process has survived its launcher"
        time.sleep(0.01)


@pytest.mark.parametrize("message", [None, b"", (100).to_bytes(8, "little")])
def test_a_server_outlives_a_launcher_that_says_only_a_part(message):
    servers = ForkServers({"plain": []})
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as launcher:
            launcher.connect(str(servers.directory / "plain.socket"))
            if message is not None:
                socket.send_fds(launcher, [message], [0, 1])
        command = [str(servers.directory / "plain"), "-c", "print(1)"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
        assert done.stdout == "1\n"
        (server,) = servers.processes
        files = os.listdir(f"/proc/{server.pid}/fd")
        assert len(files) <= 7  # its own, and none of the launcher's
    finally:
        servers.close()


def test_a_server_outlives_a_launcher_that_was_killed_before_its_answer():
    servers = ForkServers({"plain": []})
    try:
        (server,) = servers.processes
        command = [str(servers.directory / "plain"), "-c", "print(1)"]
        server.send_signal(signal.SIGSTOP)
        launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(1.0)  # until it has asked and waits
        launcher.kill()
        launcher.wait()
        server.send_signal(signal.SIGCONT)
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
        assert done.stdout == "1\n"
        assert server.poll() is None
    finally:
        servers.close()
