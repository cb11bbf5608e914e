"""Programs that behave as `python` does, but have imported the large libraries already.

Importing torch takes two seconds of a processor, Transformers and PEFT six, and the suite starts
well over a hundred processes that need them. A test that is about what a program does, and not
about what a fresh interpreter has imported, starts `find_python("torch")` in place of
`sys.executable`; "dynamo" where it captures steps or is a rank, "libraries" for Transformers, PEFT
and PyG, as the workers of a run are, "interpreter" where Triton interprets kernels. Penstock itself
is imported by each process.
Processes that `multiprocessing` spawns for a test are such programs, too (`pytest_configure`).
A test that is about the end of a process adds `WHOLE_END` to its environment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
VARIABLE = "FORK_SERVERS_OF_TESTS"
LIBRARIES = {
    "torch": ["numpy", "torch", "pytest"],
    "dynamo": ["numpy", "torch", "torch._dynamo"],  # and Triton, which does not interpret then
    "interpreter": ["numpy", "torch", "torch._dynamo", "triton", "triton.language", "pytest"],
    "libraries": [
        *("numpy", "torch", "torch._dynamo", "transformers.models.gpt2.modeling_gpt2"),
        *("accelerate", "lightning", "transformers.trainer", "peft", "torch_geometric.loader"),
        *("torch._inductor.compile_fx", "torch.testing._internal.common_methods_invocations"),
    ],
}
VARIABLES = {"interpreter": {"TRITON_INTERPRET": "1"}}
"""What libraries read of the environment when they are imported, by server."""
WHOLE_END = {"FORK_SERVERS_END_LIBRARIES": "1"}
"""Environment of programs that take the libraries apart when they end, as `python` does."""
LONGEST_LINE = 127  # that names an interpreter


class ForkServers:
    """One server for each entry of `LIBRARIES`; each imports when it is asked first.

    Args:
        libraries: Names of the servers, each with the libraries that it imports.
    """

    def __init__(self, libraries: dict[str, list[str]] = LIBRARIES) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-python-"))
        self.processes: list[subprocess.Popen[str]] = []
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        for name, imported in libraries.items():
            address = self.directory / f"{name}.socket"
            process = subprocess.Popen(
                [sys.executable, str(HERE / "_server.py"), str(address), *imported],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment | VARIABLES.get(name, {}),
                text=True,
                start_new_session=True,  # an interrupt is for the programs, not for the server
            )
            self.processes.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "a fork server has not started"
            write_launcher(self.directory / name, address)

    def close(self) -> None:
        """End the servers, and what still runs."""
        for process in self.processes:
            process.communicate()
        shutil.rmtree(self.directory)


@contextlib.contextmanager
def importing(name: str) -> Iterator[None]:
    """Let a server import its libraries meanwhile."""
    process = subprocess.Popen([find_python(name), "-c", ""])
    yield
    process.wait()


def write_launcher(path: Path, address: Path) -> None:
    """Write a program that has its process forked by the server at an address."""
    line = f"#!{sys.executable} -IS"
    program = (HERE / "_launcher.py").read_text()
    text = f"{line}\n{program}\n\nmain({str(address)!r}, {sys.executable!r})\n"
    if len(line) > LONGEST_LINE:
        text = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    path.write_text(text)
    path.chmod(0o700)


def find_python(name: str) -> str:
    """Return the program of a server that runs; `python` itself where none does."""
    directory = os.environ.get(VARIABLE)
    path = Path(directory, name) if directory else None
    return str(path) if path and path.exists() else sys.executable
