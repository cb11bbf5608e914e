"""The script of `penstock run`: it becomes `__main__`, runs, and ends as under `python`.

It runs in a mode: activations are offloaded, or trainers run as planned.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib.machinery
import importlib.util
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.cli._options import INTERRUPTED
from penstock.errors import PenstockError
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.activations import Offload, OffloadReport
    from penstock.integrations.transformers import PlannedTraining, TrainingReport

_logger = logging.getLogger(__name__)

Result: TypeAlias = tuple[Path | None, Callable[[Path], object]]
"""The path of a result, if it is wanted, and the function that writes it."""

_HERE = Path(__file__).parent
_PACKAGE = str(_HERE.parent) + os.sep


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
                if spec is None:
                    raise SystemExit(
                        f"penstock run: {self.name} is a package without a module __main__, and "
                        "cannot be run"
                    )
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


class NothingPlannedError(PenstockError):
    """A script under --plan trains with a loop of its own, or not at all."""


@dataclasses.dataclass(frozen=True)
class Offloading:
    """The mode in which saved activations leave the device."""

    offload: Offload
    trace_path: Path | None
    picture_path: Path | None

    @property
    def has_trained(self) -> bool:
        """True if there is anything to report."""
        return self.offload.report().num_saved > 0

    def running(self) -> AbstractContextManager[object]:
        """Return the context manager in which the script runs."""
        return self.offload

    def results(self) -> tuple[dict[str, Any], list[str], dict[str, Result]]:
        """Return entries of the report, lines to print, and the trace and the picture."""
        report = self.offload.report()
        results: dict[str, Result] = {
            "trace": (self.trace_path, self._write_trace),
            "picture": (self.picture_path, self._draw),
        }
        paths = {name: str(path) if path else None for name, (path, _) in results.items()}
        return {"offload": report.to_dict(), **paths}, _offload_lines(report), results

    def _write_trace(self, path: Path) -> None:
        from penstock.report import write_chrome_trace

        write_chrome_trace(self.offload.timeline(), path)

    def _draw(self, path: Path) -> None:
        from penstock.report import draw_timeline

        draw_timeline(self.offload.timeline(), path)


class Planning:
    """The mode in which each step of a trainer runs as planned.

    `options` are those of `plan_trainers`. If it is optional, a script that trains with a loop of
    its own runs without a plan.
    """

    def __init__(self, options: dict[str, Any], *, is_optional: bool = False) -> None:
        from penstock.integrations.transformers import plan_trainers

        self._trainers = plan_trainers(**options)
        self._trainings: list[PlannedTraining] = []
        self._is_optional = is_optional
        self._has_own_loop = False
        self._has_planned_itself = False

    @property
    def has_trained(self) -> bool:
        """True if there is anything to report."""
        return any(each.report() is not None for each in self._trainings)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surround the script with the planning of its trainers.

        Raises:
            NothingPlannedError: It ended without a planned step, and planning is not optional.
        """
        from unittest import mock

        import torch

        backward = torch.autograd.backward

        def checked_backward(*args: Any, **kwargs: Any) -> Any:
            self._check_loop()
            return backward(*args, **kwargs)

        with (
            mock.patch.object(torch.autograd, "backward", checked_backward),  # of Tensor.backward
            self._trainers as self._trainings,
        ):
            yield
        if not (self._is_optional or self.has_trained or self._has_planned_itself):
            raise NothingPlannedError(
                "no transformers.Trainer took a step in the script, so nothing was planned; "
                "--plan=auto accepts that"
            )

    def _check_loop(self) -> None:
        """Refuse the first backward pass of a loop of the script's own, or say so once."""
        from penstock.integrations.transformers import is_training

        if self._has_own_loop or is_training():
            return
        if _is_called_by_penstock():  # penstock.fit, called by the script
            self._has_planned_itself = True
            return
        line = _script_line()
        said = (
            f"{line} calls backward() outside of a transformers.Trainer: --plan plans the steps "
            "of a Trainer, and nothing of this loop"
        )
        if not self._is_optional:
            raise NothingPlannedError(
                f"{said}. Call penstock.fit in the script, run it without --plan to offload its "
                "activations, or with --plan=auto to go on without a plan"
            )
        self._has_own_loop = True
        _logger.warning("%s; it goes on without a plan (--plan=auto)", said)

    def results(self) -> tuple[dict[str, Any], list[str], dict[str, Result]]:
        """Return entries of the report, lines to print, and no further results."""
        reports = [training.report() for training in self._trainings]
        done = [report for report in reports if report is not None]
        lines = [_planned_line(report) for report in done]
        return (
            {"planned": [report.to_dict() for report in done]},
            lines or ["no transformers.Trainer took a step in the script; nothing was planned"],
            {},
        )


def _offload_lines(report: OffloadReport) -> list[str]:
    if report.num_saved == 0:
        return [
            "the script's main thread saved no activations for a backward pass; nothing was "
            "offloaded. Threads and processes that it starts need penstock.offload of their own; "
            "ranks are started with torchrun"
        ]
    share = report.offloaded_bytes / max(report.saved_bytes, 1)
    return [
        f"{_count(report.num_steps, 'step')} saved {format_bytes(report.saved_bytes)}; "
        f"{format_bytes(report.offloaded_bytes)} ({share:.0%}) left the device, "
        f"at most {format_bytes(report.peak_device_bytes)} were on it at once; "
        f"waited {format_seconds(report.stall_seconds)}",
        f"policy {report.policy}: {report.reason}",
    ]


def _is_called_by_penstock() -> bool:
    """Return whether a backward pass is part of a capture, and not the script's own."""
    for frame in traceback.extract_stack()[::-1]:
        path = Path(frame.filename)
        if _HERE.parent in path.parents and path != Path(__file__):
            return path.parent != _HERE  # frames of `penstock run` itself are around every script
    return False


def _script_line() -> str:
    """Return the innermost line that belongs to no installed package."""
    import torch

    packages = (str(Path(torch.__file__).parents[1]), _PACKAGE, "<frozen")
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(packages):
            return f"{frame.filename}:{frame.lineno}"
    return "the script"


def _planned_line(report: TrainingReport) -> str:
    line = (
        f"{_count(report.num_planned_steps, 'step')} by {_count(report.num_plans, 'plan')} in "
        f"{format_bytes(report.arena_bytes + report.workspace_bytes)}; "
        f"{format_bytes(sum(report.moved_bytes.values()))} moved in each; "
        f"{format_seconds(report.step_seconds)} a step (planned "
        f"{format_seconds(report.predicted_step_seconds)}), "
        f"waited {format_seconds(report.stall_seconds)}"
    )
    if report.num_padded_steps:
        line += f"; {report.num_padded_steps} padded"
    if report.num_ordinary_steps:
        line += f"; {_count(report.num_ordinary_steps, 'ordinary step')} beside them"
    return line


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


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
    if code is None or isinstance(code, int):
        return Ending((code or 0) & 0xFF)  # what the operating system keeps of it
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
