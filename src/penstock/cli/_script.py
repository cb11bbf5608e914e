"""The script of `penstock run`: it becomes `__main__`, runs, and ends as under `python`."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib.machinery
import importlib.util
import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from penstock.cli._modes import NothingPlannedError, Offloading, Planning
from penstock.cli._options import INTERRUPTED
from penstock.errors import PenstockError

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


@dataclasses.dataclass(frozen=True)
class Script:
    """A program as the arguments of `python` name one."""

    name: str
    """Path of a file, of a directory or zip file with a ``__main__.py``, or a module name."""
    arguments: tuple[str, ...] = ()
    """The script's ``sys.argv[1:]``."""
    is_module: bool = False
    """True if `name` is a module name, as after ``python -m``."""

    @property
    def is_stdin(self) -> bool:
        """True for a script on standard input, as of `python -`."""
        return self.name == "-" and not self.is_module

    @property
    def is_bundle(self) -> bool:
        """True for a directory or a zip file that holds a `__main__.py`."""
        if self.is_module or self.is_stdin:
            return False
        if os.path.isdir(self.name):
            return True
        with open(self.name, "rb") as file:
            return file.read(4) == b"PK\x03\x04"

    def exists(self) -> bool:
        """Return False for a file that is missing; modules are looked for when they run."""
        return self.is_module or self.is_stdin or os.path.exists(self.name)

    def load(self) -> tuple[ModuleType, CodeType]:
        """Make the new `__main__`, and set `sys.argv` and `sys.path`, as `python` does."""
        main = ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        # Python sets no first entry under -P and PYTHONSAFEPATH; then there is none to replace.
        first_path = self._find_first_path()
        if sys.flags.safe_path:
            if self.is_bundle:
                sys.path.insert(0, first_path)
        else:
            sys.path[0] = first_path
        sys.argv = [self.name, *self.arguments]
        if self.is_stdin:
            main.__file__ = "<stdin>"
            sys.modules["__main__"] = main
            return main, compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True)
        if not self.is_module and not self.is_bundle:
            # A path relative to where the script started would be wrong after os.chdir.
            path = os.path.abspath(self.name)
            main.__file__ = path
            main.__dict__["__cached__"] = None
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
            sys.modules["__main__"] = main
            with io.open_code(path) as file:
                return main, compile(file.read(), path, "exec", dont_inherit=True)
        spec, code = self._find_code()
        main.__spec__ = spec
        main.__loader__ = spec.loader
        main.__file__ = spec.origin
        main.__package__ = spec.parent
        main.__dict__["__cached__"] = spec.cached
        if self.is_module:
            sys.argv[0] = spec.origin or self.name
        sys.modules["__main__"] = main
        return main, code

    def _find_first_path(self) -> str:
        if self.is_stdin:
            return ""
        if self.is_module:
            return os.getcwd()
        if self.is_bundle:
            return os.path.abspath(self.name)
        return os.path.dirname(os.path.realpath(self.name))

    def _find_code(self) -> tuple[importlib.machinery.ModuleSpec, CodeType]:
        if self.is_module:
            spec = _find_module(self.name)
            if spec is not None and spec.submodule_search_locations is not None:  # a package
                spec = _find_module(f"{self.name}.__main__")
        else:
            spec = importlib.machinery.PathFinder.find_spec("__main__", [self._find_first_path()])
        # InspectLoader's method; frozen, zip and source loaders all have it.
        get_code = getattr(spec and spec.loader, "get_code", None)
        code = get_code(spec.name) if spec is not None and get_code is not None else None
        if spec is None or code is None:
            missing = "module" if self.is_module else "__main__.py in"
            raise SystemExit(f"penstock run: cannot find {missing} {self.name}")
        return spec, code


def _find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # A missing parent package is a wrong name; anything else is the parent's own broken import.
        if error.name is not None and (name + ".").startswith(error.name + "."):
            return None
        raise


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of a script, and the words that are still to be said about it."""

    exit_code: int
    exception: str | None = None
    has_started: bool = True
    speak: Callable[[], None] | None = None

    def finish(self) -> int:
        """Print what Python itself would print at this end, last of all; return the exit status."""
        if self.speak is not None:
            self.speak()
        return self.exit_code


def run_script(script: Script, mode: Offloading | Planning) -> Ending:
    """Run a script as `__main__` within a mode; every way to end is an `Ending`."""
    has_started = False
    try:
        main, code = script.load()
        has_started = True
        with mode.running():
            # The module stays in sys.modules: threads, atexit handlers and pickle still need it.
            exec(code, main.__dict__)
        mode.finish()
    except SystemExit as stop:
        return dataclasses.replace(_read_exit(stop.code), has_started=has_started)
    except NothingPlannedError as error:
        return Ending(2, str(error), speak=functools.partial(say, f"penstock run: {error}"))
    except BaseException as error:
        text = "".join(traceback.format_exception_only(error)).strip()
        exit_code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        shown = error.with_traceback(_trim_traceback(error))
        return Ending(
            exit_code,
            text,
            has_started,
            lambda: sys.excepthook(type(shown), shown, shown.__traceback__),
        )
    return Ending(0)


def _read_exit(code: Any) -> Ending:
    """Read the argument of `sys.exit`: nothing, a status, or last words for stderr and status 1."""
    if code is None:
        return Ending(0)
    if isinstance(code, int):
        return Ending(code)
    return Ending(1, f"SystemExit: {code}", speak=lambda: say(str(code)))


def _trim_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback from the script on, without the frames that started it.

    Of Penstock's own errors no frame of Penstock is shown: the message says what is wrong.
    """
    remaining = error.__traceback__
    while remaining is not None:
        file_name = remaining.tb_frame.f_code.co_filename
        if file_name != __file__ and not file_name.startswith("<frozen importlib"):
            break
        remaining = remaining.tb_next
    if not isinstance(error, PenstockError):
        return remaining
    error.__suppress_context__ = True
    frames = []
    while remaining is not None:
        if not remaining.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            frames.append(remaining)
        remaining = remaining.tb_next
    shown = None
    for each in reversed(frames):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown


def say(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{text}\n")
