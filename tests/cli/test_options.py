"""Commands are made from dataclasses: fields become options, errors a line and a status."""

import dataclasses
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli import _plan, _run
from penstock.cli._options import add_command, list_parameters, size_option
from penstock.cli.demo import DemoOptions
from penstock.errors import PenstockError


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


def test_our_own_errors_keep_their_traceback():
    def fail(_):
        raise AssertionError("ours")

    assert isinstance(invoke(fail, "x").exception, AssertionError)


@pytest.mark.parametrize("options", [_run.RunOptions, _plan.PlanOptions, DemoOptions])
def test_every_field_of_a_command_is_an_option(options):
    names = {parameter.name for parameter in list_parameters(options)}
    assert {field.name for field in dataclasses.fields(options)} - names <= {"seed"}
