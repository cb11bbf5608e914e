import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import graph_cases
import penstock.graph
import penstock.memory
import penstock.report
from fork_servers import find_python
from penstock.cli import _models, _plan, app
from penstock.cli._models import SHAPES, ModelError, ModelOptions, load_graph
from penstock.cli._options import Interruption
from penstock.cli._plan import CapturedModel, PlanOptions, parse_device_memory
from penstock.errors import GraphFileError
from penstock.graph import StepGraph
from penstock.planner import Plan, check

UNIT = 256
SOURCES = str(Path(penstock.graph.__file__).parents[2])
SWEEP = ("--sweep", "--time-limit", "0.1", "--machine", "test")
OPTIONS = ModelOptions(batch=2, sequence=16, optimizer="sgd", dtype="float32")


@pytest.fixture
def on_a_machine(monkeypatch):
    """A machine that needs no measuring."""

    def machine(name):
        return graph_cases.machine(out=UNIT, back=UNIT)

    monkeypatch.setattr(penstock.memory, "machine", machine, raising=False)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "graph.json"
    graph = graph_cases.chain_step(6, weight_bytes=UNIT, activation_bytes=2 * UNIT)
    operators = tuple(dataclasses.replace(each, seconds=1.0) for each in graph.operators)
    dataclasses.replace(graph, operators=operators).save(path)
    return path


def run(*arguments):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.usefixtures("on_a_machine")
def test_a_saved_graph_is_planned_and_everything_written(saved, tmp_path):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / "new" / name for name in ("plan.json", "trace.json", "plan.png")}
    options = ("--device-memory", "60%", "--time-limit", "0.1", "--machine", "test")
    paths = ("--save", files["plan.json"], "--trace", files["trace.json"])
    code, out, _ = run(saved, *options, *paths, "--picture", files["plan.png"])
    assert code == 0
    assert "no plan beats" in out
    assert "activations" in out
    graph = StepGraph.load(saved)
    plan = Plan.load(files["plan.json"], graph=graph)
    check(graph, plan)
    assert plan.method == "auto"
    assert json.loads(files["trace.json"].read_text())["traceEvents"]
    assert files["plan.png"].stat().st_size > 1000


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("plan", ("--save", "/proc/x.json")),
        ("plan", ("--save-graph", "/proc/x.json")),
        ("plan", ("--picture", "/proc/x.png")),
        ("partition", ("--save", "/proc/x.json")),
        ("partition", ("--picture", "x.txt")),
        ("explain", ("--picture", "x.txt")),
    ],
)
def test_results_that_cannot_be_written_are_refused_first(command, wrong):
    if wrong[0] == "--picture":
        pytest.importorskip("matplotlib")
    result = CliRunner().invoke(app, [command, "no_such_module:make", *wrong])
    assert result.exit_code == 2
    assert f"penstock {command}: {wrong[0]} {wrong[1]}: " in result.stderr


@pytest.mark.usefixtures("on_a_machine")
def test_a_result_that_fails_leaves_the_others(saved, tmp_path, monkeypatch):
    def fail(graph, plan, path):
        raise RuntimeError("no luck")

    monkeypatch.setattr(penstock.report, "draw_plan", fail)
    options = ("--device-memory", "60%", "--time-limit", "0.1", "--machine", "test")
    picture, trace = tmp_path / "plan.png", tmp_path / "trace.json"
    code, out, err = run(saved, *options, "--picture", picture, "--trace", trace)
    assert code == 2
    assert f"penstock plan: the picture {picture} could not be written: no luck\n" in err
    assert f"trace: {trace}" in out and trace.exists() and "picture:" not in out


@pytest.mark.usefixtures("on_a_machine")
def test_a_sweep_goes_down_until_nothing_fits(saved, tmp_path):
    path = tmp_path / "points.json"
    code, out, _ = run(saved, *SWEEP, "--save", path)
    assert code == 0
    points = json.loads(path.read_text())
    names = [point["name"] for point in points["points"]]
    assert names[:2] == ["stock", "checkpointing"]
    assert names.count("plans") >= 3
    assert points["minimum_bytes"]
    assert re.search(r"stock +\S+ \w+ +1\.00", out)


@pytest.mark.usefixtures("on_a_machine")
def test_a_sweep_is_shown_whole_on_narrow_terminals_without_unicode(saved, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    result = CliRunner(charset="ascii").invoke(app, ["plan", str(saved), *SWEEP])
    assert result.exit_code == 0
    assert re.search(r"stock +\S+ \w+ +1\.00 +19\.0 s +100% #{10}", result.stdout)
    assert result.stdout.isascii()


def test_help_is_shown_on_terminals_without_unicode():
    code = "import sys; from penstock import cli; sys.argv[1:] = ['plan', '--help']; cli.main()"
    done = subprocess.run(
        [find_python("dynamo"), "-c", code],
        capture_output=True,
        env=os.environ | {"PYTHONPATH": SOURCES, "PYTHONIOENCODING": "ascii"},
        timeout=200,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr
    assert b"--device-memory" in done.stdout


def test_a_faster_plan_of_less_memory_counts_for_more():
    def point(name: str, device_bytes: int, seconds: float):
        return penstock.report.SweepPoint(
            name=name, device_bytes=device_bytes, step_seconds=seconds, lower_bound_seconds=1.0
        )

    stock = point("stock", 10, 1.0)
    found = _plan._take_faster(
        [stock, point("plans", 8, 3.0), point("plans", 6, 2.0), point("plans", 4, 5.0)]
    )
    assert found == [stock, point("plans", 8, 2.0), point("plans", 6, 2.0), point("plans", 4, 5.0)]


@pytest.mark.usefixtures("on_a_machine")
def test_ctrl_c_ends_a_sweep_with_what_there_is(saved, monkeypatch):
    real, calls = CapturedModel.make_plan, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(CapturedModel, "make_plan", interrupted)
    code, out, _ = run(saved, *SWEEP)
    assert code == 0
    assert len(calls) == 3
    assert out.count("plan ") >= 2


def test_ctrl_c_during_the_capture_says_that_there_is_nothing(saved, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(_models, "load_graph", interrupted)
    with pytest.raises(Interruption):
        _plan.plan(PlanOptions(model=str(saved), machine="test"))
    assert "interrupted before there was a plan" in capsys.readouterr().err


@pytest.mark.usefixtures("on_a_machine")
def test_what_does_not_fit_is_an_error_without_traceback(saved):
    code, _, err = run(saved, "--device-memory", "1KiB", "--machine", "test")
    assert code == 2
    enough = re.search(r"Give (\S+ \S+) \(a plan exists there\)", err)
    assert enough is not None and "operator" in err and "--device-memory 1.00 KiB is too" in err
    assert "a smaller batch, or --split-products\n" in err and "Traceback" not in err
    again = ("--device-memory", enough[1], "--machine", "test", "--time-limit", "0.1")
    assert run(saved, *again)[0] == 0


def test_shares_and_sizes():
    assert parse_device_memory(None, 1000) is None
    assert parse_device_memory("1/8", 1000) == 125
    assert parse_device_memory("12.5%", 1000) == 125
    assert parse_device_memory("1KiB", 1000) == 1024
    with pytest.raises(ValueError, match=r'--device-memory.*; got .1/0.; or .*"1/8" or "25%"'):
        parse_device_memory("1/0", 1000)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gpt2", "--device-memory", "abc"), '"1/8"'),
        (("gpt2", "--sweep", "--device-memory", "1GiB"), "no use of --device-memory"),
        (("{graph}", "--batch", "3", "--optimizer", "sgd"), "leave out --batch and --optimizer"),
        (("train:two", "--dtype", "float16"), "leave out --dtype"),
        (("train:two",), "returned a tuple of 2: it must"),
        (("{plan}",), "plan.json is a plan and no step graph"),
        (("{damaged}",), "damaged.json: this step graph"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments, said, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    (tmp_path / "train.py").write_text("def two():\n    return 1, 2\n")
    (tmp_path / "plan.json").write_text('{"format": "penstock-plan"}')
    (tmp_path / "damaged.json").write_text(saved.read_text().replace("512", "513"))
    names = {name: tmp_path / f"{name}.json" for name in ("graph", "plan", "damaged")}
    code, _, err = run(*(each.format(**names) for each in arguments))
    assert code == 2
    assert said in err and "Traceback" not in err


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_errors_of_a_function_are_shown_from_its_line_on(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    (tmp_path / "train.py").write_text("def bad():\n    raise RuntimeError('no luck')\n")
    with pytest.raises(SystemExit) as stop:
        app([command, "train:bad"], standalone_mode=False)
    errors = capsys.readouterr().err
    assert stop.value.code == 1
    assert errors.count("File ") == 1 and "train.py" in errors and "no luck" in errors


def test_what_is_no_model_is_said(tmp_path, monkeypatch):
    with pytest.raises(ModelError, match="gpt2, gpt2-medium"):
        load_graph("nonsense", OPTIONS)
    with pytest.raises(ModelError, match="cannot be imported"):
        load_graph("no_such_module:make", ModelOptions())
    (tmp_path / "half_written.py").write_text("def make(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=r"cannot be imported \(.*half_written\.py, line 1"):
        load_graph("half_written:make", ModelOptions())
    with pytest.raises(ModelError, match="cannot be read"):
        load_graph(str(tmp_path / "none.json"), OPTIONS)
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{")
    with pytest.raises(ModelError, match="no JSON"):
        load_graph(str(wrong), OPTIONS)
    wrong.write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="'no-such-model'"):
        load_graph(str(wrong), OPTIONS)
    wrong.write_text('{"format": "something"}')
    with pytest.raises(GraphFileError):
        load_graph(str(wrong), ModelOptions())
    with pytest.raises(ModelError, match="names no function"):
        load_graph(":", ModelOptions())


def test_a_function_of_the_user_is_captured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_training.py").write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Linear(4, 3)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    return model, optimizer, torch.ones(2, 4), lambda output, batch: output.sum()\n"
        "def wrong():\n"
        "    return 1\n"
    )
    graph = load_graph("my_training:make", ModelOptions())
    assert graph.loss is not None
    parameters = [storage for storage in graph.storages if storage.kind == "parameter"]
    assert {s.num_bytes for s in parameters} == {64}  # 48 and 12, in whole alignments
    assert {(3, 4), (3,)} <= {view.shape for view in graph.tensors.values()}
    with pytest.raises(ModelError, match="returned int"):
        load_graph("my_training:wrong", ModelOptions())


def test_a_configuration_is_captured(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    path.write_text(json.dumps({"model_type": "gpt2", **small}))
    graph = load_graph(str(path), OPTIONS)
    names = {storage.name for storage in graph.storages}
    assert any("h.0.attn" in name for name in names)
    inputs = [s.num_bytes for s in graph.storages if s.kind == "input"]
    assert 2 * 16 * 8 in inputs


def test_shapes_are_those_that_were_published():
    transformers = pytest.importorskip("transformers")
    import torch

    millions = {"gpt2-xl": 1557.6, "bert-large": 335.2, "t5-large": 737.7, "llama-13b": 13015.9}
    for name, expected in millions.items():
        values = dict(SHAPES[name])
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        kind = {"bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration"}.get(
            config.model_type, "AutoModelForCausalLM"
        )
        make = getattr(transformers, kind)
        with torch.device("meta"):
            model = make.from_config(config) if kind.startswith("Auto") else make(config)
        count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        assert count == pytest.approx(expected, abs=0.1)


def timed(graph, seconds=1e-3):
    operators = tuple(dataclasses.replace(o, seconds=seconds) for o in graph.operators)
    return dataclasses.replace(graph, operators=operators)


@pytest.fixture
def timed_steps(tmp_path):
    """A training step whose operators have times, so that no machine is measured."""
    path = tmp_path / "timed.json"
    timed(graph_cases.chain_step(8, weight_bytes=2**20, activation_bytes=2**22)).save(path)
    return path


def test_a_store_takes_what_leaves(timed_steps, tmp_path):
    path = tmp_path / "plan.json"
    options = ("--device-memory", "60%", "--machine", "v100-16gb-pcie3", "--no-recompute")
    code, out, _ = run(
        timed_steps, *options, "--store", tmp_path, "--time-limit", 0.1, "--save", path
    )
    assert code == 0
    plan = Plan.load(path, graph=StepGraph.load(timed_steps))
    check(StepGraph.load(timed_steps), plan)
    assert plan.peak_file_bytes > 0
    assert "file" in out


def test_too_little_host_memory_is_said(timed_steps):
    options = ("--device-memory", "60%", "--machine", "h200", "--no-recompute")
    code, _, err = run(timed_steps, *options, "--host-memory", "1KiB", "--time-limit", 0.1)
    assert code == 2
    assert "--host-memory 1.00 KiB is too little" in err and "raise --device-memory\n" in err


def test_exact_plans_of_training_steps(timed_steps, tmp_path):
    saved = tmp_path / "plan.json"
    options = ("--device-memory", "80%", "--machine", "h200", "--time-limit", "10")
    code, _, err = run(timed_steps, *options, "--method", "exact", "--save", str(saved))
    assert code == 0, err
    plan = Plan.load(saved)
    assert plan.method == "exact"
    assert plan.notes["lower_bound_bytes"] <= plan.notes["non_compulsory_bytes"]


def test_operators_that_need_too_much_are_split(tmp_path):
    """Logits and their gradients: beside the workspace, half of one, one fits and two do not."""
    graph, model = tmp_path / "graph.json", tmp_path / "config.json"
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50_000, "n_positions": 32}
    model.write_text(json.dumps({"model_type": "gpt2", **small}))
    pytest.importorskip("transformers")
    load_graph(str(model), OPTIONS).save(graph)
    logits = 2 * 16 * 50_000 * 4
    path = tmp_path / "plan.json"
    options = ("--device-memory", f"{int(2.3 * logits)}", "--machine", "h200", "--time-limit", 0.1)
    code, out, _ = run(graph, *options, "--save", path, "--trace", tmp_path / "trace.json")
    assert code == 0
    assert "split" in out
    captured = StepGraph.load(graph)
    plan = Plan.load(path, graph=captured)
    check(captured, plan)
    assert len(plan.planned_graph(captured).operators) == len(plan.operator_seconds)
    names = (tmp_path / "trace.json").read_text()
    assert "log_softmax_backward_data[1]" in names


def test_ctrl_c_takes_the_best_plan_so_far(tmp_path):
    path, saved_plan = tmp_path / "graph.json", tmp_path / "plan.json"
    step = graph_cases.chain_step(60, weight_bytes=2**20, activation_bytes=2**22)
    timed(step, 1e-4).save(path)  # moving takes longer than computing: the search goes on
    options = ["--device-memory", "40%", "--machine", "v100-16gb-pcie3", "--time-limit", "600"]
    command = [find_python("dynamo"), "-m", "penstock", "plan", str(path), *options]
    with subprocess.Popen(
        [*command, "--save", str(saved_plan)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": SOURCES, "FORCE_COLOR": "1"},  # progress is for terminals
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        shown = b""
        while b", gap" not in shown:
            news = os.read(process.stderr.fileno(), 4096)
            assert news, shown.decode()
            shown += news
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, (shown + errors).decode()
    assert b"no plan beats" in out
    graph = StepGraph.load(path)
    plan = Plan.load(saved_plan, graph=graph)
    check(graph, plan)
    assert plan.notes["search_seconds"] < 500
