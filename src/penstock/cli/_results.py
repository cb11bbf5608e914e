"""Files of a command's results: refused before the work if they cannot be written, each by itself.

One result that cannot be written takes no other with it, and neither traceback nor work is lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.compat.packages import import_package
from penstock.errors import PenstockError
from penstock.memory.files import check_replaceable, replace_file

STANDARD_OUTPUT = Path("-")
"""The value of `--report` for standard output."""


class ResultError(PenstockError):
    """A result cannot be written where an option says."""


def check_results(**paths: Path | None) -> None:
    """Make the directories of results, and refuse those that cannot be written there.

    Args:
        **paths: The values of `--save`, `--save-graph`, `--report`, `--trace` and `--picture`.

    Raises:
        ResultError: A file cannot be written, or a picture not drawn; it names the option.
    """
    for name, path in paths.items():
        if path is not None and (name, path) != ("report", STANDARD_OUTPUT):
            option = f"--{name.replace('_', '-')}"
            if name == "picture":
                _check_picture(path)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                check_replaceable(path)
            except OSError as error:
                raise ResultError(
                    f"{option} {path}: cannot be written ({error.strerror}); name a file in a "
                    "writable directory"
                ) from error


def _check_picture(path: Path) -> None:
    import_package("matplotlib", "--picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = FigureCanvasAgg.get_supported_filetypes()
    suffix = path.suffix[1:].lower()
    if suffix and suffix not in kinds:
        raise ResultError(
            f"--picture {path}: no picture is written as {path.suffix!r}; the end of the name is "
            f"one of {', '.join(f'.{kind}' for kind in sorted(kinds))}"
        )


def write_results(
    command: str, results: Mapping[str, tuple[Path | None, Callable[[Path], object]]]
) -> dict[str, Path]:
    """Write each result that has a path; one that fails is a line on stderr.

    Args:
        command: The command, for these lines: `"penstock plan"`.
        results: By its name, the path and the function that writes it.

    Returns:
        The paths of those that were written, by name.
    """
    written = {}
    for name, (path, write) in results.items():
        if path is None:
            continue
        try:
            write(path)
        except Exception as error:  # whatever it is, the other results are written
            words = str(error) or type(error).__name__
            print(f"{command}: the {name} {path} could not be written: {words}", file=sys.stderr)
        else:
            written[name] = path
    return written


def show_results(
    command: str, results: Mapping[str, tuple[Path | None, Callable[[Path], object]]]
) -> None:
    """Write results as `write_results` does, print their paths, and exit with 2 if one failed."""
    written = write_results(command, results)
    for name, path in written.items():
        print(f"{name}: {path}")
    if len(written) < sum(path is not None for path, _ in results.values()):
        sys.exit(2)


def write_text(path: Path, text: str) -> None:
    """Write a result that is text; `-` is standard output."""
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        replace_file(path, text)
