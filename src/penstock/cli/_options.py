"""Commands from dataclasses: each field is an option, written once with its default and help."""

from __future__ import annotations

import dataclasses
import inspect
import re
import signal
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin, get_type_hints

import typer

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from rich.console import Console

_Options = TypeVar("_Options")

OPEN_TRACE = "open it with https://ui.perfetto.dev."
NEEDS_VIZ = "as a PNG (or SVG, PDF); needs the extra `viz`."
INTERRUPTED = -signal.SIGINT  # a program that Ctrl-C ended, as `subprocess` counts


class Interruption(BaseException):
    """Ctrl-C, about which all is said: the process ends by it, so that loops of a shell do, too."""


def _kind_of_option(**settings: Any) -> Callable[..., Any]:
    """Return a function of the help text, and of names and further settings if need be."""

    def make(help_text: str, *names: str, **more: Any) -> Any:
        return typer.Option(*names, help=help_text, **settings | more)

    return make


size_option = _kind_of_option(metavar="SIZE", show_default=False)  # bytes, or such as 8GiB
file_option = _kind_of_option(metavar="FILE", show_default=False)  # written
directory_option = _kind_of_option(metavar="DIR", show_default=False)  # of offloaded bytes
name_option = _kind_of_option(metavar="NAME")  # one of some
number_option = _kind_of_option(metavar="N")  # a whole number
hidden_option = _kind_of_option(hidden=True, min=1)  # a whole number that `--help` leaves out

MODEL_ARGUMENT = typer.Argument(
    metavar="MODEL",
    help="A name such as gpt2 or llama-7b; a JSON file with a Transformers configuration "
    "or a saved step graph; or module:function.",
    show_default=False,
)
MACHINE_OPTION = typer.Option(
    metavar="NAME",
    help="v100-16gb-pcie3, a100-80gb, h100-80gb or h200. Default: this machine.",
    show_default=False,
)
SAVE_GRAPH_OPTION = file_option(
    "Write the captured step, as .json or .json.gz; it can be MODEL next time."
)


def add_command(
    app: typer.Typer,
    name: str,
    options: type[_Options],
    function: Callable[[_Options], None],
    **settings: Any,
) -> None:
    """Add a function of an options dataclass to the command line; its docstring is the help.

    The options are the fields that are annotated with one of typer's, inherited ones last. Errors
    that a user can act on become a line on stderr and status 2.
    """
    parameters = list_parameters(options)

    def run(**values: Any) -> None:
        try:
            function(options(**values))
        except KeyboardInterrupt as error:
            print(f"penstock {name}: interrupted", file=sys.stderr)
            raise Interruption from error
        except BrokenPipeError:  # the reader has left: typer ends without a word
            raise
        except (PenstockError, ValueError, OSError, ImportError) as error:
            text = name_options(str(error), [each.name for each in parameters])
            print(f"penstock {name}: {text}", file=sys.stderr)
            sys.exit(2)

    run.__doc__ = function.__doc__
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, **settings)(run)


def name_options(text: str, names: Iterable[str]) -> str:
    """Write arguments of functions in an error as the options of a command that has them.

    Example:
        >>> name_options("device_memory=1 B: pass store=", ["device_memory", "store"])
        '--device-memory 1 B: pass --store'
    """

    def write(match: re.Match[str]) -> str:
        option = f"--{match[1].replace('_', '-')}"
        return option + (f" {match[2]}" if match[2] and match[2] != "True" else "")

    return re.sub(rf"\b({'|'.join(names)})=(True\b|[\w'\"]|)", write, text)


def has_unicode(console: Console) -> bool:
    """Return True if a console shows more than ASCII."""
    return (console.encoding or "utf-8").lower().startswith("utf")


def list_parameters(options: type[Any]) -> list[inspect.Parameter]:
    """Return the options of a dataclass as parameters of a function, inherited ones last."""
    hints = get_type_hints(options, include_extras=True)
    own, empty = inspect.get_annotations(options), inspect.Parameter.empty
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in sorted(dataclasses.fields(options), key=lambda each: each.name not in own)
        if get_origin(hints[field.name]) is Annotated
    ]
