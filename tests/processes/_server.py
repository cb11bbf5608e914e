"""A process that imports large libraries once, and forks one that has them for each request.

Started as a program, with the address of its socket and the libraries as arguments. It imports
them at the first request, and ends when its standard input does. It has no threads.

A process that ends finalises what it has made and imported itself. What was there when it was
forked it leaves to the system, as taking torch apart takes 0.2 s, most of a small program's time,
and clearing Python's own tables, all strings among them, 0.1 s; with `END_LIBRARIES` in its
environment that ends as well, modules and C++'s static objects.
"""

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import marshal
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
import warnings
import weakref
from importlib.machinery import SourceFileLoader

NUM_FILES = 250  # the most that a message carries
END_LIBRARIES = "FORK_SERVERS_END_LIBRARIES"
FIRST_KEPT = 500  # above the numbers of a process's own files


class Request:
    """A process to be forked, as `_launcher.main` describes it.

    Raises:
        OSError: The launcher was killed before it had said all.
    """

    def __init__(self, connection: socket.socket) -> None:
        content, self.received, _, _ = socket.recv_fds(connection, 8, NUM_FILES)
        length, text = int.from_bytes(content, "little"), b""
        while len(text) < max(1, length):
            part = connection.recv(1 << 16)
            if not part:
                self.close_files()
                raise ConnectionAbortedError
            text += part
        for name, value in marshal.loads(text).items():
            setattr(self, name, value)

    def close_files(self) -> None:
        """Close the launcher's files, here."""
        for file in self.received:
            os.close(file)


def serve(address: str, libraries: list[str]) -> Request:
    """Fork processes until standard input ends; return in each, with its request."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(100)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, "accept")
    selector.register(sys.stdin, selectors.EVENT_READ, "end")
    running: dict[int, tuple[socket.socket, int]] = {}  # by process: its launcher, its descriptor
    while True:
        for key, _ in selector.select():
            if key.data == "end":
                for process in running:
                    os.kill(process, signal.SIGKILL)
                sys.exit()
            if key.data == "accept":
                connection, _ = listener.accept()
                try:
                    request = Request(connection)
                except OSError:
                    connection.close()
                    continue
                if libraries:
                    import_all(libraries, request.environment)
                    libraries = []
                process = os.fork()
                if process == 0:
                    selector.close()
                    for each in (listener, connection, *(own for own, _ in running.values())):
                        each.detach()  # its number will be another file's
                    become(request)
                    return request
                request.close_files()
                with contextlib.suppress(OSError):  # the launcher was killed meanwhile
                    connection.send(str(process).encode())
                running[process] = connection, os.pidfd_open(process)
                selector.register(running[process][1], selectors.EVENT_READ, process)
                selector.register(connection, selectors.EVENT_READ, -process)
            elif key.data < 0:  # the launcher was killed
                if -key.data in running:
                    os.kill(-key.data, signal.SIGKILL)
                selector.unregister(key.fileobj)
            else:
                connection, file = running.pop(key.data)
                _, status = os.waitpid(key.data, 0)
                with contextlib.suppress(OSError):
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
                selector.unregister(file)
                os.close(file)
                with contextlib.suppress(KeyError):
                    selector.unregister(connection)
                connection.close()


def import_all(libraries: list[str], environment: dict[str, str]) -> None:
    """Import what all processes share, which reads the number of threads from the environment."""
    threads = {
        name: value
        for name, value in environment.items()
        if name.endswith(("_NUM_THREADS", "_WAIT_POLICY"))
    }
    os.environ.update(threads)
    shared: dict[str, types.ModuleType] = {}
    atexit.register(leave_out, shared)  # before what the libraries register, and so the last to run
    own = set(sys.modules)
    for name in libraries:
        with contextlib.suppress(ImportError):  # the process that needs it says so
            importlib.import_module(name)
    importlib.invalidate_caches()
    # Python notes each module's file when it first looks for that of a piece of code, as torch does
    # for each operator: 0.2 s of each process for thousands of modules.
    if (inspect := sys.modules.get("inspect")) is not None:
        inspect.getmodule(compile("", "<of no module>", "exec"))
    shared.update((name, each) for name, each in sys.modules.items() if name not in own)
    gc.collect()
    gc.freeze()


def leave_out(modules: dict[str, types.ModuleType]) -> None:
    """Keep the end of Python, which is to come, from taking modules apart."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))
    for name, module in modules.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    # Where something is wrong with the output Python says so, and the status is another one.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
        if statuses:
            sys.last_of_all = LastOfAll(statuses[-1])  # type: ignore[attr-defined]


statuses: list[int] = []  # with which this process ends


class LastOfAll:
    """Ends the process once Python has finalised all modules and clears `sys`.

    Args:
        status: Exit status of the process.
    """

    def __init__(self, status: int) -> None:
        self.end, self.status = ctypes.PyDLL(None).exit, status

    def __del__(self) -> None:
        self.end(self.status)


def leave_at_exit() -> None:
    """Keep the end of the process from destroying the static objects that C++ has by now.

    Nor does it call what the libraries' own objects are finalised with.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # runs before what was registered before it, with the status
    for each in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        each.atexit = False


def become(request: Request) -> None:
    """Take over the launcher's files, environment and directory."""
    import fcntl

    kept = [fcntl.fcntl(file, fcntl.F_DUPFD, FIRST_KEPT) for file in request.received]
    for file in range(3, FIRST_KEPT):
        with contextlib.suppress(OSError):
            os.close(file)
    for file in {0, 1, 2} - set(request.files):
        os.close(file)
    for file, number in zip(kept, request.files, strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.directory)
    interrupt = signal.SIG_IGN if request.ignores_interrupts else signal.default_int_handler
    signal.signal(signal.SIGINT, interrupt)
    sys.executable = request.executable
    if END_LIBRARIES in request.environment:
        atexit.unregister(leave_out)
    else:
        leave_at_exit()
    if "multiprocessing.spawn" in sys.modules:
        sys.modules["multiprocessing.spawn"].set_executable(request.executable)
    sys.dont_write_bytecode = bool(request.environment.get("PYTHONDONTWRITEBYTECODE"))
    paths = [each for each in request.environment.get("PYTHONPATH", "").split(":") if each]
    sys.path[:] = ["", *paths, *sys.path[1:]]
    threads = request.environment.get("OMP_NUM_THREADS")
    if threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))


def run(arguments: list[str]) -> None:
    """Run arguments of `python` in a new `__main__`."""
    while arguments[0][:2] in ("-W", "-B", "-u"):
        option, *arguments = arguments
        if option == "-B":
            sys.dont_write_bytecode = True
            continue
        if option == "-u":
            sys.stdout, sys.stderr = (
                io.TextIOWrapper(io.FileIO(file, "w", closefd=False), write_through=True)
                for file in (1, 2)
            )
            continue
        if option == "-W":
            option, *arguments = arguments
        sys.warnoptions.append(option.removeprefix("-W"))
        warnings._processoptions(sys.warnoptions[-1:])  # type: ignore[attr-defined]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    first, *others = arguments
    if first == "-c":
        sys.argv = [first, *others[1:]]
        exec(compile(others[0], "<string>", "exec", dont_inherit=True), main.__dict__)
    elif first == "-m":
        sys.argv = [first, *others[1:]]
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(others[0])  # type: ignore[attr-defined]
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.realpath(first))
        path = os.path.join(os.getcwd(), first)
        loader = SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
        code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)


def run_as_python(arguments: list[str]) -> None:
    """Run arguments, and end as `python` does: a traceback without this file, then the status."""
    try:
        run(arguments)
        statuses.append(0)
    except SystemExit as end:
        status = end.code or 0
        statuses.append(status if isinstance(status, int) else 1)
        raise
    except BaseException as error:
        while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_filename in (
            __file__,
            runpy.__file__,
        ):
            error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        statuses.append(1)
        sys.exit(1)


if __name__ == "__main__":
    sys.path[0] = ""
    run_as_python(serve(sys.argv[1], sys.argv[2:]).arguments)
