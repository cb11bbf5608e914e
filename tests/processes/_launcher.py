"""`python`, as far as a test can tell: asks a fork server for a process, and stands for it.

The text of this file, below a line that names the interpreter, is a program of its own
(`fork_servers.write_launcher`). It passes on its arguments, environment, directory and open files,
then its signals; its exit status is that of the process. What the server cannot do as `python`
would, `python` does.

It imports only what is a module of C: the others take as long as Python itself to start.
"""

import _signal as signal  # pyright: ignore[reportMissingImports] (it has no stub)
import _socket as socket
import marshal
import os
import sys

# What the server's interpreter has read before it forks; these it reads again.
READ_AGAIN = {"PYTHON", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}
FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}


def is_served(arguments: list[str]) -> bool:
    """Return whether the server runs these arguments as `python` does."""
    if any(name.startswith("PYTHON") and name not in READ_AGAIN for name in os.environ):
        return False
    while len(arguments) > 1 and arguments[0][:2] in ("-W", "-B", "-u"):
        arguments = arguments[2 if arguments[0] == "-W" else 1 :]
    if not arguments:
        return False
    if arguments[0] in ("-c", "-m"):
        return len(arguments) > 1
    return not arguments[0].startswith("-") and os.path.isfile(arguments[0])


def list_files() -> list[int]:
    """Return the files that a program started here would inherit."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:  # the one that has listed them
            continue
    return found


def main(address: str, python: str) -> None:
    """Have a process forked and wait for its end."""
    arguments = sys.argv[1:]
    if not is_served(arguments):
        os.execv(python, [python, *arguments])
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    files = list_files()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(address)
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "files": files,
        "executable": sys.argv[0],
        "ignores_interrupts": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
    }
    text = marshal.dumps(request)
    rights = b"".join(file.to_bytes(4, sys.byteorder) for file in files)
    server.sendmsg(
        [len(text).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
    )
    for start in range(0, len(text), 60_000):
        server.send(text[start : start + 60_000])
    process = int(server.recv(100))
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(process, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = int(server.recv(100) or -signal.SIGKILL)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
