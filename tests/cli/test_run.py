"""The command line from outside: scripts under `penstock run` behave as under `python`.

Starting torch takes seconds, so cases that need no process of their own share one: `launch_all`;
most others have theirs forked (`find_python`).
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import penstock
from fork_servers import find_python
from penstock import cli
from penstock.cli import _run, _script

SOURCE = Path(__file__).resolve().parents[2] / "src"
OURS = re.compile(r"^penstock.*\n", re.MULTILINE)

TRAIN = """
import sys
import torch

model = torch.nn.Sequential(*[torch.nn.Linear(256, 256), torch.nn.GELU()] * 3)
for step in range(2):
    model(torch.randn(1024, 256)).square().mean().backward()
if "raise" in sys.argv:
    raise ValueError("no luck")
"""

END = """
import sys

def inner():
    raise ValueError("no luck")

if "raise" in sys.argv:
    inner()
if "exit" in sys.argv:
    sys.exit(7)
if "word" in sys.argv:
    sys.exit("last word")
if "interrupt" in sys.argv:
    raise KeyboardInterrupt
"""

# Everything about its surroundings that a script can tell.
ABOUT_ME = """
import inspect, json, os, pickle, sys
class Thing:
    pass
main = sys.modules["__main__"]
if __name__ == "__main__":
    print(json.dumps({
        "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
        "package": __package__, "spec": __spec__ and __spec__.name, "cached": __cached__,
        "loader": type(__loader__).__name__, "same": main.__dict__ is globals(),
        "builtins": type(__builtins__).__name__, "source": inspect.getsource(Thing),
        "pickled": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
    }))
"""


def environment(**changes: str) -> dict[str, str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in {"PENSTOCK_STORE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTHONSAFEPATH"}
    }
    return {**clean, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1", **changes}


def run_python(
    *arguments: str | Path, cwd: Path, python: str = sys.executable, **changes: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *map(str, arguments)],
        cwd=cwd,
        env=environment(**changes),
        capture_output=True,
        text=True,
        check=False,
    )


def penstock_run(
    *arguments: str | Path, cwd: Path, python: str = sys.executable, **changes: str
) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "penstock", "run", *arguments, cwd=cwd, python=python, **changes)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


# ---------------------------------------------------------------------------------- the surface


def test_help_teaches_by_example():
    for command in ("run", "probe", "env", "demo"):
        result = CliRunner().invoke(cli.app, [command, "--help"])
        assert result.exit_code == 0, result.output
        assert f"penstock {command}" in result.output
        assert "Examples" in result.output
    result = CliRunner().invoke(cli.app, ["--help"])
    assert "penstock demo" in result.output


def test_help_does_not_import_torch(tmp_path: Path):
    code = "import sys, penstock.cli, penstock.cli._plan; print('torch' in sys.modules)"
    assert run_python("-c", code, cwd=tmp_path).stdout == "False\n"


def test_version():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.output == f"penstock {penstock.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nope.py"], "cannot open 'nope.py'"),
        (["--device-memory", "8G", "."], "--device-memory must be"),
        (["--report", "{file}/x.json", "."], "--report"),
        (["--trace", "{directory}", "."], "--trace"),
        (["--picture", "/proc/x.png", "."], "--picture /proc/x.png: cannot be written"),
        (["--picture", "{directory}/x.txt", "."], "no picture is written as '.txt'"),
        (["--plan", "."], "--plan needs --device-memory"),
        (["--plan", "--device-memory", "8GiB", "--trace", "x.json", "."], "--trace and --picture"),
        (["--plan=auto", "--device-memory", "8GiB", "--policy", "all", "."], "--policy has no"),
        (["--plan", "--device-memory", "8GiB", "--min-bytes", "0", "."], "--min-bytes has no"),
        (["--time-limit", "5", "."], "--time-limit has no effect without --plan"),
        (["--plan", "--device-memory", "8GiB", "--time-limit", "0", "."], "--time-limit"),
    ],
)
def test_wrong_arguments_are_said_before_torch_is_imported(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(_run, "set_up_process", lambda **_: pytest.fail("went on"))
    (tmp_path / "file").touch()
    names = {"file": tmp_path / "file", "directory": tmp_path}
    with pytest.raises(SystemExit) as stop:
        cli.app(["run", *(argument.format(**names) for argument in arguments)])
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err


def test_unknown_options_before_the_script_are_refused():
    result = CliRunner().invoke(cli.app, ["run", "--polcy", "all", "train.py"])
    assert result.exit_code == 2


@pytest.mark.usefixtures("quick_probe")
def test_probe_as_table_and_as_json(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_STORE", str(store))
    result = CliRunner().invoke(cli.app, ["probe", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["links"]
    # From the cache this time; the option wins over the variable.
    monkeypatch.setenv("PENSTOCK_STORE", "/nowhere")
    result = CliRunner().invoke(cli.app, ["probe", "--store", str(store)])
    assert "penstock.probe" in result.output
    result = CliRunner().invoke(cli.app, ["probe"])
    assert result.exit_code == 2
    assert "/nowhere" in result.output


# --------------------------------------------------------------------------- as python would do it


def test_a_script_sees_what_it_sees_under_python(store: Path, tmp_path: Path):
    """Script, module, package, directory and zip file, each against `python` itself."""
    (tmp_path / "about.py").write_text(ABOUT_ME)
    for package in ("package", "folder"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__main__.py").write_text(ABOUT_ME)
    (tmp_path / "package" / "__init__.py").touch()
    with zipfile.ZipFile(tmp_path / "bundle.zip", "w") as bundle:
        bundle.writestr("__main__.py", ABOUT_ME)
    (tmp_path / "link.py").symlink_to(tmp_path / "folder" / "__main__.py")
    targets = [
        ["about.py", "--epochs", "3", "--", "-m"],
        [str(tmp_path / "about.py"), "--help"],
        ["link.py"],
        ["folder", "x"],
        ["bundle.zip", "x"],
        ["-m", "about", "--store", "y"],
        ["-m", "package", "-x"],
    ]
    expected = [run_python(*target, cwd=tmp_path).stdout for target in targets]
    # Module names must be found from the current directory although PYTHONPATH comes first.
    cases = [
        _run.RunOptions(
            script=target[1] if target[0] == "-m" else target[0],
            arguments=target[2:] if target[0] == "-m" else target[1:],
            module=target[0] == "-m",
            store=str(store),
        )
        for target in targets
    ]
    results = launch_all(cases, cwd=tmp_path, python=find_python("torch"))
    for target, wanted, (exit_code, output, errors) in zip(targets, expected, results, strict=True):
        assert exit_code == 0, errors
        assert json.loads(output) == json.loads(wanted), target


DRIVER = """
import json, os, sys
from penstock.cli import _run
cases = json.loads(sys.argv[1])
first_path = sys.path[0]
for case in cases:
    sys.path[0] = first_path
    sys.modules.pop("about", None)
    print("<case>", flush=True)
    print("<case>", file=sys.stderr, flush=True)
    exit_code = _run.launch(_run.RunOptions(**case))
    print(f"<end>{exit_code}", flush=True)
"""


def launch_all(
    cases: list[_run.RunOptions], *, cwd: Path, python: str
) -> list[tuple[int, str, str]]:
    """Launch scripts one after the other in one process: (exit status, stdout, stderr)."""
    plain = [{**vars(case)} for case in cases]
    done = run_python("-c", DRIVER, json.dumps(plain), cwd=cwd, python=python)
    assert done.returncode == 0, done.stderr
    outputs = done.stdout.split("<case>\n")[1:]
    errors = done.stderr.split("<case>\n")[1:]
    results = []
    for output, error in zip(outputs, errors, strict=True):
        text, _, exit_code = output.partition("<end>")
        results.append((int(exit_code), text, error))
    return results


def test_ends_of_a_script(store: Path, tmp_path: Path):
    """Exit status and last words are those of `python`, for every way in which a script can end."""
    (tmp_path / "wrong.py").write_text("x = (\n")
    (tmp_path / "end.py").write_text(END)
    ends = ["", "raise", "exit", "word", "interrupt"]
    cases = [_run.RunOptions(script="end.py", arguments=[end], store=str(store)) for end in ends]
    cases.append(_run.RunOptions(script="wrong.py", store=str(store)))
    cases.append(_run.RunOptions(script="nowhere.module", module=True, store=str(store)))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    cases.append(_run.RunOptions(script=".", store=str(store)))
    cases.append(_run.RunOptions(script="package", module=True, store=str(store)))
    results = launch_all(cases, cwd=tmp_path, python=find_python("torch"))
    assert [exit_code for exit_code, _, _ in results] == [0, 1, 7, 1, -2, 1, 1, 1, 1]
    said = [OURS.sub("", errors) for _, _, errors in results]
    assert said[0] == said[2] == ""
    assert said[1] == run_python("end.py", "raise", cwd=tmp_path).stderr
    assert said[3] == "last word\n"
    assert said[4].startswith("Traceback")
    assert said[4].endswith("KeyboardInterrupt\n")
    assert said[5] == run_python("wrong.py", cwd=tmp_path).stderr
    assert "package is a package without a module __main__" in results[8][2]
    for missing, (_, _, errors) in zip(("nowhere.module", "."), results[6:8], strict=True):
        assert "cannot find " in errors and missing in errors
        assert "Traceback" not in errors
    assert not any("saved no activations" in errors for _, _, errors in results[5:])


def test_the_report_is_written_also_when_the_script_raises(store: Path, script: Path):
    done = penstock_run(
        "--store", store, "--policy", "all", "--min-bytes", "4KiB", "--report", "out.json",
        "--trace", "deep/er/trace.json", "--picture", "picture.png", "train.py", "raise",
        cwd=script.parent,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: no luck\n")
    assert "_script.py" not in done.stderr
    report = json.loads((script.parent / "out.json").read_text())
    assert (report["exit_code"], report["exception"]) == (1, "ValueError: no luck")
    assert (report["target"], report["arguments"]) == ("train.py", ["raise"])
    assert report["arrangement"]["allocator"] in ("caching", "stock")
    assert report["offload"]["num_steps"] == 2
    assert report["offload"]["policy"] == "all"
    assert report["offload"]["offloaded_bytes"] >= 0.85 * report["offload"]["saved_bytes"] > 0
    trace = json.loads(Path(report["trace"]).read_text())
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C"}
    assert Path(report["picture"]).read_bytes().startswith(b"\x89PNG")
    summary = "".join(OURS.findall(done.stderr))
    assert "2 steps" in summary
    assert "out.json" in summary


TRAINER = """
import torch, transformers

torch.set_num_threads(1)
torch.manual_seed(0)
config = transformers.GPT2Config(
    n_embd=64, n_layer=1, n_head=2, n_positions=32, vocab_size=128, bos_token_id=0, eos_token_id=0
)
model = transformers.GPT2LMHeadModel(config)
tokens = torch.randint(1, 128, (8, 32), generator=torch.Generator().manual_seed(0))
trainer = transformers.Trainer(
    model=model,
    args=transformers.TrainingArguments(
        output_dir="out", max_steps=3, per_device_train_batch_size=4, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True, logging_steps=1,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
)
trainer.train()
print("weights", [parameter.double().sum().item() for parameter in model.parameters()])
"""


def test_trainers_of_a_script_run_as_planned(probed_store: Path, tmp_path: Path):
    pytest.importorskip("transformers", reason="penstock[demo] installs Transformers")
    pytest.importorskip("accelerate", reason="Trainer needs it")
    (tmp_path / "train.py").write_text(TRAINER)
    plain = run_python("train.py", cwd=tmp_path, python=find_python("libraries"))
    planned = penstock_run(
        "--plan", "--device-memory", "448KiB", "--store", probed_store, "--time-limit", "0.1",
        "--report", "out.json", "train.py",
        cwd=tmp_path, python=find_python("libraries"),
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    weights = [done.stdout[done.stdout.index("weights") :] for done in (plain, planned)]
    assert weights[0] == weights[1]
    report = json.loads((tmp_path / "out.json").read_text())
    (steps,) = report["planned"]
    assert steps["num_steps"] == 3
    assert steps["arena_bytes"] + steps["workspace_bytes"] <= 448 << 10
    assert "3 steps by 1 plan in " in "".join(OURS.findall(planned.stderr))


LOOP = """
import torch
print("started")
weight = torch.ones(3, requires_grad=True)
for step in range(2):
    weight.square().sum().backward()
print("trained", weight.grad.tolist())
"""


@pytest.mark.parametrize(
    ("option", "planned"), [("--plan", (True, False)), ("--plan=auto", (False, True))]
)
def test_how_a_plan_is_asked_for(option: str, planned: tuple[bool, bool], monkeypatch):
    asked = []
    monkeypatch.setattr(_run, "launch", lambda options: asked.append(options) or 0)
    for value in [option] if option.endswith("auto") else [option, f"{option}=always"]:
        with pytest.raises(SystemExit):
            cli.app(["run", value, "--device-memory", "1MiB", "train.py", "--plan=auto"])
    assert {(options.plan, options.plan_auto) for options in asked} == {planned}
    assert {tuple(options.arguments) for options in asked} == {("--plan=auto",)}


def test_a_loop_of_the_scripts_own_is_refused_before_it_trains(tmp_path: Path):
    pytest.importorskip("transformers", reason="penstock[demo] installs Transformers")
    pytest.importorskip("accelerate", reason="Trainer needs it")
    (tmp_path / "train.py").write_text(LOOP)
    refused, went_on = launch_all(
        [
            _run.RunOptions(script="train.py", device_memory="1MiB", plan=True),
            _run.RunOptions(script="train.py", device_memory="1MiB", plan_auto=True),
        ],
        cwd=tmp_path,
        python=find_python("libraries"),
    )
    for _, output, errors in (refused, went_on):
        said = "".join(errors.split("\n"))
        assert "train.py:6 calls backward() outside of a transformers.Trainer" in said
        assert "started" in output
    exit_code, output, errors = went_on
    assert exit_code == 0
    assert "trained [4.0, 4.0, 4.0]" in output
    assert "nothing was planned" in errors
    exit_code, output, errors = refused
    assert exit_code == 2
    assert "trained" not in output
    assert "--plan=auto" in errors
    assert "Traceback" not in errors


def test_a_script_that_does_not_train_has_not_been_planned():
    pytest.importorskip("transformers", reason="penstock[demo] installs Transformers")
    for is_optional in (True, False):
        planning = _script.Planning({"device_memory": "1MiB"}, is_optional=is_optional)
        refusal = pytest.raises(_script.NothingPlannedError, match="nothing was planned")
        with contextlib.nullcontext() if is_optional else refusal, planning.running():
            pass
        entries, (line,), _ = planning.results()
        assert entries == {"planned": []}
        assert "nothing was planned" in line


def test_a_script_that_calls_fit_has_planned_itself():
    pytest.importorskip("transformers", reason="penstock[demo] installs Transformers")
    import torch

    model = torch.nn.Linear(2, 1)
    planning = _script.Planning({"device_memory": "1MiB"})
    with planning.running():
        penstock.capture(
            model,
            torch.optim.SGD(model.parameters()),
            (torch.ones(1, 2),),
            loss=lambda output, batch: output.sum(),
        )


def test_the_plans_value_behind_the_script_is_the_scripts(tmp_path: Path, store: Path):
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])")
    done = penstock_run(
        "--store", store, "train.py", "--plan=auto", "x", cwd=tmp_path, python=find_python("torch")
    )
    assert "['--plan=auto', 'x']" in done.stdout


def test_a_script_comes_from_standard_input(tmp_path: Path, store: Path):
    code = "import sys; print(__name__, sys.argv, repr(sys.path[0]), __file__)"
    outputs = [
        subprocess.run(
            [find_python("torch"), *command, "-", "a"],
            cwd=tmp_path,
            input=code,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for command in ([], ["-m", "penstock", "run", "--store", str(store)])
    ]
    assert outputs[0] == outputs[1] == "__main__ ['-', 'a'] '' <stdin>\n"


def test_errors_of_planning_show_the_scripts_lines_alone(tmp_path: Path, probed_store: Path):
    pytest.importorskip("transformers", reason="penstock[demo] installs Transformers")
    pytest.importorskip("accelerate", reason="Trainer needs it")
    (tmp_path / "train.py").write_text(TRAINER)
    done = penstock_run(
        *("--plan", "--device-memory", "64KiB", "--store", probed_store, "--time-limit", "0.1"),
        "train.py", cwd=tmp_path, python=find_python("libraries"),
    )  # fmt: skip
    assert done.returncode == 1
    assert "InfeasibleError: device_memory=64.00 KiB" in done.stderr
    assert "trainer.train()" in done.stderr
    assert f"{Path(penstock.__file__).parent}" not in done.stderr


PROCESSES = """
import multiprocessing, os

def double(x):
    return 2 * x

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
    child = os.fork()
    if child == 0:
        raise SystemExit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os.chdir("/")
"""


def test_processes_that_a_script_starts(store: Path, tmp_path: Path):
    """Spawned ones find the script; forked ones that run to its end leave the report alone."""
    (tmp_path / "processes.py").write_text(PROCESSES)
    done = penstock_run(
        "--report", "out.json", "processes.py",
        cwd=tmp_path, python=find_python("torch"),
        PENSTOCK_STORE=str(store), RANK="1", WORLD_SIZE="2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2, 4]\n3\n"
    assert done.stderr.count("nothing was offloaded") == 1
    assert "processes that it starts need penstock.offload of their own" in done.stderr
    # One of several ranks: its own file, in the directory where it was started.
    assert [path.name for path in tmp_path.glob("*.json")] == ["out.rank1.json"]
    report = json.loads((tmp_path / "out.rank1.json").read_text())
    assert (report["rank"], report["exit_code"]) == ("1", 0)


class ModeOfBrokenPictures:
    has_trained = True

    def results(self):
        def draw(path):
            raise RuntimeError("no luck")

        return {}, ["trained"], {"picture": (Path("x.png"), draw)}


@pytest.mark.parametrize("name", ["out.json", "-"])
def test_a_picture_that_fails_leaves_the_report(name: str, tmp_path: Path, monkeypatch, capsys):
    """And "-" is standard output."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    options = _run._resolve(_run.RunOptions(script="train.py", report=Path(name)))
    mode: Any = ModeOfBrokenPictures()
    _run._write_results(options, mode, {}, _script.Ending(0), 1.0)
    shown = capsys.readouterr()
    written = shown.out if name == "-" else (tmp_path / name).read_text()
    assert json.loads(written)["target"] == "train.py"
    assert "penstock run: the picture x.png could not be written: no luck\n" in shown.err
    assert "Traceback" not in shown.err and "picture in" not in shown.err
    assert {path.name for path in tmp_path.glob("*")} == {"train.py", name} - {"-"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "out.json"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "out.json"),
        ({"RANK": "12", "LOCAL_RANK": "4", "WORLD_SIZE": "16"}, "out.rank12.json"),
        ({"LOCAL_RANK": "4"}, "out.rank4.json"),
    ],
)
def test_where_a_rank_writes(
    variables: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _run._resolve_path(tmp_path / "out.json") == tmp_path / expected


def test_ctrl_c_ends_the_process_after_a_report(store: Path, tmp_path: Path, script: Path):
    script.write_text(
        "import atexit, time\natexit.register(print, 'atexit')\n"
        "print('ready', flush=True)\nwhile True:\n    time.sleep(0.1)\n"
    )
    command = [find_python("torch"), "-m", "penstock", "run", "--store", str(store)]
    with subprocess.Popen(
        [*command, "--report", "out.json", "train.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)  # into the sleep
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert errors.endswith("KeyboardInterrupt\n") and errors.count("Traceback") == 1
    assert output == "atexit\n"
    assert json.loads((tmp_path / "out.json").read_text())["exit_code"] == -2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], ["--store DIR", "PENSTOCK_STORE", "no GPU"]), (["--store", "missing"], ["missing"])],
)
def test_without_a_store_it_is_said_what_to_do(
    arguments: list[str], expected: list[str], script: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_run, "set_up_process", lambda **_: None)
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)
    with pytest.raises(SystemExit) as stop:
        cli.app(["run", *arguments, str(script)])
    assert stop.value.code == 2
    errors = capsys.readouterr().err
    assert all(words in errors for words in expected)


def test_without_typer_only_env_works(tmp_path: Path):
    (tmp_path / "typer.py").write_text("raise ImportError('no typer here')\n")
    path = f"{tmp_path}{os.pathsep}{SOURCE}"
    done = run_python("-m", "penstock", "run", "x.py", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 1
    assert "no typer here" in done.stderr
    assert "python -m penstock.env" in done.stderr
    # A torch that fails at once keeps this quick; test_env has the rest.
    (tmp_path / "torch.py").write_text("raise ImportError\n")
    done = run_python("-m", "penstock", "env", "--json", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 1  # torch is broken
    assert json.loads(done.stdout)["checks"]
