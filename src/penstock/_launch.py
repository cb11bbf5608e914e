"""What `penstock run` does: an unmodified training script, as `python` runs it, but it fits.

What is done to it is a mode (`_launch_modes.py`): `offload`, or planned steps of its trainers.

The order matters. First the process is arranged (`arrange_process`: the allocator, before the
script makes its first tensor), then the store is opened, then the script becomes `__main__`.
Whatever the script does (end, raise, exit, be interrupted), the report is written.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib.machinery
import importlib.util
import io
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Literal

from penstock._launch_modes import NothingPlannedError, Offloading, Planning
from penstock._vector_math import settle_vector_math
from penstock.errors import PenstockError
from penstock.units import parse_bytes

logger = logging.getLogger(__name__)

STORE_VARIABLE = "PENSTOCK_STORE"
_INTERRUPTED = 130  # what a shell reports for a program that SIGINT ended


class LaunchError(PenstockError):
    """A script cannot be started: wrong arguments, no store, no such file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What to run, and how."""

    target: str
    """Path of a script (or of a directory or zip file with a ``__main__.py``), or a module name."""
    arguments: tuple[str, ...] = ()
    """What the script finds in ``sys.argv[1:]``."""
    is_module: bool = False
    """Whether `target` is a module name, as after ``python -m``."""
    store: str | None = None
    """Directory of the file tier; None takes the environment variable ``PENSTOCK_STORE``."""
    device_memory: str | None = None
    """Budget on the device, such as ``"8GiB"``: for saved activations (None: no budget), or for all
    of a planned step."""
    host_memory: str | None = None
    """Budget for host memory, such as ``"32GiB"``; None: no budget."""
    min_bytes: str = "1MiB"
    """Smaller storages stay where they are."""
    policy: Literal["auto", "all"] = "auto"
    """What leaves; see `penstock.offload`."""
    report_path: Path | None = None
    """Where to write the report as JSON."""
    trace_path: Path | None = None
    """Where to write the last step as a Chrome trace."""
    picture_path: Path | None = None
    """Where to draw the last step."""
    plan: bool = False
    """Whether the steps of the script's trainers run as planned, instead of offloading."""
    plan_is_optional: bool = False
    """Whether a script that trains with a loop of its own runs on without a plan."""
    time_limit: float = 60
    """Seconds for planning."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How the process was arranged before the script started; part of the report."""

    allocator: Literal["caching", "stock"]
    """Which allocator serves tensors on the CPU."""
    reason: str
    """Why that one."""


def launch(config: Launch) -> int:
    """Run a script, offloaded or planned, and write what the configuration asks for.

    Example:
        >>> launch(Launch(target="train.py", store="/mnt/nvme"))  # doctest: +SKIP
        0

    Args:
        config: what to run, and how.

    Returns:
        The exit status: the script's own, 1 after an uncaught exception, 130 after Ctrl-C.

    Raises:
        LaunchError: the script was not started; the message says why and what to do.
    """
    config = _resolve(config)
    try:
        arrangement = _arrange_for_plans() if config.plan else arrange_process()
        mode = _open_planning(config) if config.plan else _open_offloading(config)
    except (PenstockError, ValueError, OSError, ModuleNotFoundError) as error:
        raise LaunchError(str(error)) from error
    process_id = os.getpid()
    start = time.perf_counter()
    outcome = _run_target(config, mode)
    if os.getpid() != process_id:
        # A child of os.fork that ran to the end of the script: the report is the parent's.
        return outcome.finish()
    try:
        _write_results(config, mode, arrangement, outcome, time.perf_counter() - start)
    except Exception:  # the script's own end must be seen, whatever became of the report
        logger.exception("penstock run: the report could not be written")
    return outcome.finish()


def arrange_process() -> Arrangement:
    """Prepare the process before the script makes its first tensor.

    Everything that has to happen before user code runs belongs here. On a machine without a GPU the
    caching allocator replaces torch's: what offloading frees then goes back to the operating system
    or to the next tensor, and not into the C library's heap. And the kernels of the CPU's vector
    mathematics are chosen while there is one thread, so that the run is one that can be repeated.

    Returns:
        What was arranged.
    """
    import torch

    settle_vector_math()
    if torch.cuda.is_available():
        return Arrangement(allocator="stock", reason="activations live on the GPU")
    from penstock.memory import CachingAllocator  # builds C++; a GPU machine needs none of it

    allocator = CachingAllocator.instance()
    # For good, without a release: the script's tensors may outlive every block.
    if not allocator.acquire():
        return Arrangement(allocator="stock", reason=allocator.reason)
    return Arrangement(allocator="caching", reason="activations live in RAM")


def _arrange_for_plans() -> Arrangement:
    settle_vector_math()
    return Arrangement(allocator="stock", reason="planned steps have an arena of their own")


def _resolve(config: Launch) -> Launch:
    """Find everything wrong with the arguments that can be found without importing torch."""
    for name in ("device_memory", "host_memory", "min_bytes"):
        value = getattr(config, name)
        if value is not None:
            try:
                parse_bytes(value, name=f"--{name.replace('_', '-')}")
            except ValueError as error:
                raise LaunchError(str(error)) from error
    if not _is_stdin(config) and not config.is_module and not os.path.exists(config.target):
        raise LaunchError(
            f"cannot open {config.target!r}: no such file. Options of penstock run stand before "
            "the script; a module is run with -m."
        )
    if config.plan and config.device_memory is None:
        raise LaunchError("--plan needs --device-memory, such as 8GiB: what a step may take")
    if config.plan and (config.trace_path or config.picture_path):
        raise LaunchError("--trace and --picture show offloading; with --plan there is --report")
    if config.picture_path and importlib.util.find_spec("matplotlib") is None:
        raise LaunchError("--picture needs matplotlib: pip install 'penstock[viz]'")
    return dataclasses.replace(
        config,
        store=config.store or os.environ.get(STORE_VARIABLE) or None,
        report_path=_result_path(config.report_path, "--report"),
        trace_path=_result_path(config.trace_path, "--trace"),
        picture_path=_result_path(config.picture_path, "--picture"),
    )


def _result_path(path: Path | None, option: str) -> Path | None:
    """Where a result goes: absolute (the script may change directory), per rank, writable."""
    if path is None:
        return None
    path = path.absolute()
    rank = _rank()
    if rank is not None:
        path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{option} {path}: cannot make its directory: {error}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise LaunchError(
            f"{option} {path}: cannot be written; name a file in a writable directory"
        )
    return path


def _rank() -> str | None:
    """The rank of this process among several that torchrun started, or None if it is alone."""
    if os.environ.get("WORLD_SIZE") == "1":
        return None
    return os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or None


def _open_offloading(config: Launch) -> Offloading:
    import torch

    import penstock

    if config.store is None and not torch.cuda.is_available():
        raise LaunchError(
            "no store: this machine has no GPU, so saved activations lie in RAM and can only leave "
            f"to a file. Pass --store DIR or set {STORE_VARIABLE}, to a directory on a fast local "
            "disk (not a tmpfs such as /dev/shm: that is RAM again)."
        )
    offload = penstock.offload(
        config.store,
        device_memory=config.device_memory,
        host_memory=config.host_memory,
        min_bytes=config.min_bytes,
        policy=config.policy,
    )
    return Offloading(offload, config.trace_path, config.picture_path)


def _open_planning(config: Launch) -> Planning:
    options = {
        "device_memory": config.device_memory,
        "host_memory": config.host_memory,
        "store": config.store,
        "time_limit": config.time_limit,
    }
    return Planning(options, is_optional=config.plan_is_optional)


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """How a script ended."""

    exit_code: int
    exception: str | None = None
    has_started: bool = True
    say: Callable[[], None] | None = None

    def finish(self) -> int:
        """Print what Python itself would print at this end, last of all; return the exit status."""
        if self.say is not None:
            self.say()
        return self.exit_code


def _run_target(config: Launch, mode: Offloading | Planning) -> _Outcome:
    has_started = False
    try:
        main, code = _load_target(config)
        has_started = True
        with mode.running():
            _execute(main, code)
        mode.finish()
    except SystemExit as stop:
        return dataclasses.replace(_exit_outcome(stop.code), has_started=has_started)
    except NothingPlannedError as error:
        return _Outcome(2, str(error), say=functools.partial(_say, f"penstock run: {error}"))
    except BaseException as error:
        text = "".join(traceback.format_exception_only(error)).strip()
        exit_code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        shown = error.with_traceback(_without_our_frames(error))
        return _Outcome(
            exit_code,
            text,
            has_started,
            lambda: sys.excepthook(type(shown), shown, shown.__traceback__),
        )
    return _Outcome(0)


def _exit_outcome(code: Any) -> _Outcome:
    """What `sys.exit(code)` means: nothing, a status, or a last word on stderr and status 1."""
    if code is None:
        return _Outcome(0)
    if isinstance(code, int):
        return _Outcome(code)
    return _Outcome(1, f"SystemExit: {code}", say=lambda: _say(str(code)))


def _without_our_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the script on; how we got there is not the reader's problem.

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
    here = os.path.dirname(__file__) + os.sep
    frames = []
    while remaining is not None:
        if not remaining.tb_frame.f_code.co_filename.startswith(here):
            frames.append(remaining)
        remaining = remaining.tb_next
    shown = None
    for each in reversed(frames):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


# ------------------------------------------------------------------------------ becoming __main__


def _load_target(config: Launch) -> tuple[ModuleType, CodeType]:
    """Make the new `__main__`, and set `sys.argv` and `sys.path`, as `python` does."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    # Python sets no first entry under -P and PYTHONSAFEPATH; then there is none to replace.
    first_path = _first_path(config)
    if sys.flags.safe_path:
        if _is_bundle(config):
            sys.path.insert(0, first_path)
    else:
        sys.path[0] = first_path
    sys.argv = [config.target, *config.arguments]
    if _is_stdin(config):
        main.__file__ = "<stdin>"
        sys.modules["__main__"] = main
        return main, compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True)
    if not config.is_module and not _is_bundle(config):
        # A path relative to where the script started would be wrong after os.chdir.
        path = os.path.abspath(config.target)
        main.__file__ = path
        main.__dict__["__cached__"] = None
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        sys.modules["__main__"] = main
        with io.open_code(path) as file:
            return main, compile(file.read(), path, "exec", dont_inherit=True)
    spec, code = _find_code(config)
    main.__spec__ = spec
    main.__loader__ = spec.loader
    main.__file__ = spec.origin
    main.__package__ = spec.parent
    main.__dict__["__cached__"] = spec.cached
    if config.is_module:
        sys.argv[0] = spec.origin or config.target
    sys.modules["__main__"] = main
    return main, code


def _is_stdin(config: Launch) -> bool:
    """Whether the script comes from standard input, as of `python -`."""
    return config.target == "-" and not config.is_module


def _first_path(config: Launch) -> str:
    if _is_stdin(config):
        return ""
    if config.is_module:
        return os.getcwd()
    if _is_bundle(config):
        return os.path.abspath(config.target)
    return os.path.dirname(os.path.realpath(config.target))


def _is_bundle(config: Launch) -> bool:
    """Whether the target is a directory or a zip file that holds a `__main__.py`."""
    if config.is_module or _is_stdin(config):
        return False
    if os.path.isdir(config.target):
        return True
    with open(config.target, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _find_code(config: Launch) -> tuple[importlib.machinery.ModuleSpec, CodeType]:
    if config.is_module:
        spec = _find_module(config.target)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = _find_module(f"{config.target}.__main__")
    else:
        spec = importlib.machinery.PathFinder.find_spec("__main__", [_first_path(config)])
    # InspectLoader's method; frozen, zip and source loaders all have it.
    get_code = getattr(spec and spec.loader, "get_code", None)
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        what = "module" if config.is_module else "__main__.py in"
        raise SystemExit(f"penstock run: cannot find {what} {config.target}")
    return spec, code


def _find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # A missing parent package is a wrong name; anything else is the parent's own broken import.
        if error.name is not None and (name + ".").startswith(error.name + "."):
            return None
        raise


def _execute(main: ModuleType, code: CodeType) -> None:
    # The module stays in sys.modules for good: threads, atexit handlers and pickle still need it.
    exec(code, main.__dict__)


# ----------------------------------------------------------------------------------- the results


def _write_results(
    config: Launch,
    mode: Offloading | Planning,
    arrangement: Arrangement,
    outcome: _Outcome,
    duration_seconds: float,
) -> None:
    import penstock

    entries, lines = mode.results()
    if not mode.has_trained and (not outcome.has_started or outcome.say is not None):
        lines = []  # what went wrong is said alone
    if config.report_path:
        _write_json(
            config.report_path,
            {
                "penstock_version": penstock.__version__,
                "target": config.target,
                "arguments": list(config.arguments),
                "is_module": config.is_module,
                "rank": _rank(),
                "exit_code": outcome.exit_code,
                "exception": outcome.exception,
                "duration_seconds": duration_seconds,
                "arrangement": dataclasses.asdict(arrangement),
                **entries,
            },
        )
    results = {
        "report": config.report_path,
        "trace": config.trace_path,
        "picture": config.picture_path,
    }
    written = [f"{name} in {path}" for name, path in results.items() if path]
    prefix = "penstock" if _rank() is None else f"penstock rank {_rank()}"
    for line in lines + ([", ".join(written)] if written else []):
        _say(f"{prefix}: {line}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    # Renamed into place: whoever watches for the file never reads half of it.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
