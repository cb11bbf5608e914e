"""Commands are made from dataclasses: fields become options, errors a line and a status."""

import dataclasses
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli import _plan, _run, app
from penstock.cli._options import add_command, list_parameters, size_option
from penstock.cli.demo import DemoOptions
from penstock.errors import PenstockError

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
COMMAND = re.compile(
    r"(?:^|.*\s)penstock ((?:run|plan|partition|explain|probe|env|demo)\b.*)", re.S
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    size: Annotated[str, size_option("Bytes.")] = "1MiB"
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Base):
    name: Annotated[str, typer.Argument()]
    count: Annotated[int, typer.Option(min=1)] = 2


def invoke(function, *arguments):
    app = typer.Typer()
    app.callback()(lambda: None)
    add_command(app, "try", Options, function)
    return CliRunner().invoke(app, ["try", *arguments])


def test_options_are_the_annotated_fields_with_the_classs_own_first():
    names = [parameter.name for parameter in list_parameters(Options)]
    assert names == ["name", "count", "size"]


def test_values_arrive_in_the_dataclass():
    seen = []
    assert invoke(seen.append, "x", "--size", "2GiB").exit_code == 0
    assert seen == [Options(name="x", count=2, size="2GiB")]


@pytest.mark.parametrize(
    "error", [PenstockError("no luck"), ValueError("no luck"), OSError("no luck")]
)
def test_errors_of_users_become_a_line_and_status_2(error):
    def fail(_):
        raise error

    result = invoke(fail, "x")
    assert result.exit_code == 2
    assert result.stderr == "penstock try: no luck\n"


def test_errors_name_options_and_not_arguments():
    def fail(_):
        raise PenstockError("size=1.00 KiB is too little: give count=, or name=True, not other=2")

    said = invoke(fail, "x").stderr
    assert said == (
        "penstock try: --size 1.00 KiB is too little: give --count, or --name, not other=2\n"
    )


def test_ctrl_c_ends_the_process_as_it_ends_python():
    code = (
        "import sys; from penstock import cli\n"
        "def interrupted(*_): raise KeyboardInterrupt\n"
        "cli._explain.import_function = interrupted\n"
        "sys.argv[1:] = ['explain', 'x:y']; cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGINT
    assert done.stderr == "penstock explain: interrupted\n"


def test_our_own_errors_keep_their_traceback():
    def fail(_):
        raise AssertionError("ours")

    assert isinstance(invoke(fail, "x").exception, AssertionError)


@pytest.mark.parametrize("options", [_run.RunOptions, _plan.PlanOptions, DemoOptions])
def test_every_field_of_a_command_is_an_option(options):
    names = {parameter.name for parameter in list_parameters(options)}
    assert {field.name for field in dataclasses.fields(options)} - names <= {"seed"}


def commands_of(page: str) -> list[str]:
    """What stands behind `penstock` in the lines of a page's blocks and in its code within text."""
    fences = re.findall(r"^```\w*\n(.*?)^```", page, re.S | re.M)
    lines = [line for block in fences for line in block.splitlines()]
    within = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", page, flags=re.S | re.M))
    found = map(COMMAND.fullmatch, [*lines, *within])
    return [match[1] for match in found if match is not None]


def find_fault(command: str) -> str:
    """The command line's refusal of arguments; "" for none, or for a name or value left out."""
    name, *arguments = shlex.split(command.split("  ")[0], comments=True)
    try:
        commands()[name].make_context(name, arguments)
    except Exception as error:  # of click, which typer has a copy of
        text = str(error)
        left_out = "Missing parameter: (model|script|function)|requires an argument"
        return "" if re.search(left_out, text) else text
    return ""


def commands() -> dict[str, Any]:
    return vars(typer.main.get_command(app))["commands"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_documentation_are_those_of_the_command_line(page):
    shown = commands_of(page.read_text())
    assert {command: fault for command in shown if (fault := find_fault(command))} == {}


@pytest.mark.parametrize("command", ["plan gpt2 --device-memry 8GiB", "run --polcy all x.py"])
def test_a_wrong_command_in_a_page_is_found(command):
    assert commands_of(f"```\npenstock {command}\n```") == [command]
    assert commands_of(f"as `penstock\n{command}` does") == []
    assert commands_of(f"as `penstock {command}` does") == [command]
    assert "No such option" in find_fault(command)


def test_examples_of_the_help_are_commands():
    shown = [command for each in commands().values() for command in commands_of(each.help)]
    assert len(shown) > 15
    assert {command: fault for command in shown if (fault := find_fault(command))} == {}
