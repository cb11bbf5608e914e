"""Models that are nowhere yet come into being where the plan has them."""

import functools
import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import penstock
from _planned import CASES, MACHINE, differences, eager_step, everything, plan_within
from fork_servers import find_python
from penstock.errors import StoreReadError
from penstock.executor import bind, save_safetensors
from penstock.executor.state.safetensors import SafetensorsFile
from penstock.graph import capture
from penstock.planner import plan

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH = torch.linspace(-1, 1, 48).reshape(6, 8)
CASE = CASES["mixture"]._replace(batch=BATCH, loss=lambda output, batch: output.square().mean())


class Tied(nn.Module):
    """Two layers with one weight, a buffer, and a norm."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.second(self.norm(self.first(x).relu()))


def on_meta():
    with torch.device("meta"):
        model = Tied()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def in_memory(initialize=None):
    """The same model, with the same first numbers."""
    model, _ = on_meta()
    model.to_empty(device="cpu")
    model.second.weight = model.first.weight
    torch.manual_seed(3)
    for module in model.modules():
        if module._parameters or module._buffers:
            with torch.no_grad():
                (initialize or type(module).reset_parameters)(module)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@functools.cache
def graph_on_meta():
    """The captured step of another model on the meta device."""
    return capture(*on_meta(), BATCH, loss=CASE.loss)


@functools.cache
def plan_on_meta(tier):
    return plan_of(graph_on_meta(), tier)


def plan_of(graph, tier):
    found = plan(graph, machine=MACHINE, time_limit=0.2)
    if tier != "device":
        found = plan_within(graph, found.peak_device_bytes // 2, tier)
    return found


def bound(model, stepper, tier, store, graph=None, **options):
    """Bind the plan of a step that is captured here, if not before."""
    if graph is None:
        graph = capture(model, stepper, BATCH, loss=CASE.loss)
        found = plan_of(graph, tier)
    else:
        found = plan_on_meta(tier)
    given = {"graph": graph, "loss": CASE.loss, "store": store, "debug": True, **options}
    return bind(found, model, stepper, **given)


@functools.cache
def eagerly(initialize=None):
    model, stepper = in_memory(initialize)
    losses = [eager_step(model, stepper, CASE) for _ in range(3)]
    return everything(model, stepper, losses)


def ones(module):
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            tensor.fill_(0.5)


def silent_ones(module):
    """As `ones`, past the tensors' version counters."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            tensor.data.fill_(0.5)


@pytest.mark.parametrize("tier", ["device", "host", "file"])
@pytest.mark.parametrize("initialize", [None, ones, silent_ones])
def test_a_model_on_the_meta_device_trains_as_one_in_memory(tier, initialize, store):
    model, stepper = on_meta()
    parameters = list(model.parameters())
    torch.manual_seed(3)
    options = {"initialize": initialize, "graph": graph_on_meta()}
    with bound(model, stepper, tier, store, **options) as step:
        assert list(map(id, model.parameters())) == list(map(id, parameters))
        assert model.second.weight is model.first.weight
        losses = [step(BATCH) for _ in range(3)]
        found = everything(model, stepper, losses)
    assert differences(eagerly(initialize), found, "") == []
    assert differences(found, everything(model, stepper, losses), "closed") == []


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Adadelta"])
def test_layers_that_were_frozen_before_have_no_state_yet(name, foreach):
    """As of a head that is trained first: others begin where an ordinary step begins."""
    options = {"lr": 0.1, "foreach": foreach, **({"momentum": 0.9} if name == "SGD" else {})}

    def half_trained():
        model, _ = in_memory()
        stepper = getattr(torch.optim, name)(model.parameters(), **options)
        model.first.requires_grad_(False)
        eager_step(model, stepper, CASE)
        model.first.requires_grad_(True)
        return model, stepper

    model, stepper = half_trained()
    assert 0 < len(stepper.state) < len(list(model.parameters()))
    with bound(model, stepper, "host", None) as step:
        losses = [step(BATCH) for _ in range(3)]
    eager, eager_stepper = half_trained()
    expected = [eager_step(eager, eager_stepper, CASE) for _ in range(3)]
    found = everything(model, stepper, losses)
    assert differences(everything(eager, eager_stepper, expected), found, "") == []


def test_what_was_nowhere_stays_where_it_came_to_be(store):
    model, stepper = on_meta()
    with bound(model, stepper, "file", store) as step:
        step(BATCH)
        tensors = [*model.parameters(), *(s["exp_avg"] for s in stepper.state.values())]
        addresses = [tensor.data_ptr() for tensor in tensors]
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert eager_step(model, stepper, CASE).isfinite()  # it is good for ordinary training
    assert list(store.iterdir()) == []


def test_a_tensor_without_numbers_is_noticed(store):
    model, stepper = on_meta()
    with bound(model, stepper, "device", store, initialize=lambda module: None):
        assert all(parameter.isnan().all() for parameter in model.parameters())


def test_an_initialization_that_fails_leaves_everything_on_the_meta_device(store):
    model, stepper = on_meta()
    tied = model.first.weight
    calls = []

    def fail(module):
        calls.append(module)
        if len(calls) == 2:
            raise OSError("no numbers")
        ones(module)

    with pytest.raises(OSError, match="no numbers"):
        bound(model, stepper, "file", store, initialize=fail)
    assert all(each.is_meta for each in (*model.parameters(), *model.buffers()))
    assert model.second.weight is model.first.weight is tied
    assert not any(stepper.state.values())
    torch.manual_seed(3)
    with bound(model, stepper, "file", store, initialize=ones) as step:  # as if for the first time
        losses = [step(BATCH) for _ in range(3)]
        found = everything(model, stepper, losses)
    assert differences(eagerly(ones), found, "") == []


def test_an_initialization_of_a_model_in_memory_is_refused():
    model, stepper = in_memory()
    with pytest.raises(ValueError, match=r"initialize='model.safetensors': .* load_state_dict"):
        bound(model, stepper, "device", None, initialize="model.safetensors")


def test_modules_that_cannot_start_by_themselves_are_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x * self.scale

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Scale())
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"1\.scale .* initialize="):
        bound(model, stepper, "device", None)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("num_files", [1, 2])
def test_numbers_from_safetensors_files(num_files, store, tmp_path):
    source, _ = in_memory()
    tensors = {k: v for k, v in source.state_dict().items() if k != "second.weight"}
    names = sorted(tensors)
    paths = []
    for part in range(num_files):
        paths.append(tmp_path / f"{part}.safetensors")
        save_file({name: tensors[name] for name in names[part::num_files]}, paths[-1])
    model, stepper = on_meta()
    options = {"initialize": paths if num_files > 1 else paths[0], "graph": graph_on_meta()}
    with bound(model, stepper, "file", store, **options) as step:
        losses = [step(BATCH) for _ in range(3)]
        found = everything(model, stepper, losses)
    assert differences(eagerly(), found, "") == []


def test_files_that_do_not_fit_are_refused(tmp_path):
    source, _ = in_memory()
    tensors = {k: v for k, v in source.state_dict().items() if k != "second.weight"}
    for changes, words in (
        ({"norm.bias": None}, "no tensor 'norm.bias'; add a file"),
        ({"first.weight": torch.zeros(8, 7)}, r"first.weight.* of shape \(8, 7\)"),
        ({"first.bias": torch.zeros(8, dtype=torch.float64)}, "float64"),
    ):
        changed = {k: v for k, v in (tensors | changes).items() if v is not None}
        save_file(changed, tmp_path / "changed.safetensors")
        model, stepper = on_meta()
        with pytest.raises(ValueError, match=words):
            bound(model, stepper, "device", None, initialize=tmp_path / "changed.safetensors")
        assert all(parameter.is_meta for parameter in model.parameters())
        assert not stepper.state


def test_a_buffer_that_no_file_has_may_be_in_memory(tmp_path):
    class Shifted(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.register_buffer("shift", torch.arange(8.0), persistent=False)

        def forward(self, x):
            return super().forward(x + self.shift)

    source = Shifted()
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Shifted()
    options = {"device_memory": "1MiB", "initialize": tmp_path / "model.safetensors"}
    options |= {"machine": MACHINE, "time_limit": 0.05, "cache": False}
    fit = functools.partial(
        penstock.fit, loss=lambda output, batch: output.square().mean(), **options
    )
    stepper, x = torch.optim.SGD(model.parameters()), torch.ones(4, 8)
    with pytest.raises(ValueError, match=r"no tensor 'shift'; .* make it in memory before"):
        fit(model, stepper, x)
    model.shift = source.shift.clone()
    with fit(model, stepper, x) as step:
        assert torch.equal(step(x), source(x).square().mean())


def test_safetensors_out_are_what_safetensors_reads(store, tmp_path):
    model, stepper = on_meta()
    with bound(model, stepper, "file", store) as step:
        step(BATCH)
        save_safetensors(model.state_dict(), tmp_path / "out.safetensors")
        found = load_file(tmp_path / "out.safetensors")
        expected = {k: v.clone() for k, v in model.state_dict().items() if k != "second.weight"}
    assert differences(expected, found, "") == []
    restored = Tied()
    restored.load_state_dict(found, strict=False)
    assert restored.second.weight.equal(model.second.weight)


def test_every_dtype_and_empty_tensors_go_out_and_in(tmp_path):
    tensors = {
        str(dtype): torch.arange(12).reshape(3, 4).to(dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.int64)
    }
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 2), "t": torch.rand(3, 4).T}
    save_safetensors(tensors, tmp_path / "a.safetensors")
    assert differences(tensors, load_file(tmp_path / "a.safetensors"), "") == []
    file = SafetensorsFile(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        place = torch.empty_like(tensor)
        file.read(name, place)
        assert differences(tensor, place, name) == []
    with pytest.raises(ValueError, match="complex128"):
        save_safetensors({"c": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "b.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_safetensors({"a": torch.ones(4)}, path)
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[:5],
        b"\xff" * 8 + whole[8:],
        whole[:-4],
        whole.replace(b"F32", b"F64"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"no safetensors file|damaged"):
            SafetensorsFile(path)
    path.write_bytes(whole)
    file = SafetensorsFile(path)
    path.write_bytes(whole[:-4])
    with pytest.raises(StoreReadError, match="ends in the middle"):
        file.read("a", torch.empty(4))


CHILD = """
import json, resource, sys, threading
from pathlib import Path
import torch
from torch import nn
torch.set_num_threads(1)
import penstock
from penstock.executor import bind
from penstock.graph import capture
from penstock.planner import plan

def memory_bytes(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

arm, store, allowed, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
threading.stack_size(256 * 1024)
WIDTH, LAYERS, STEPS = 1024, 20, 3
loss_of = lambda output, batch: (output - batch).square().mean()
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(0)
batch = torch.randn(32, WIDTH)
state_bytes = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
if arm != "free":
    limit = memory_bytes("VmData") + allowed
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
if arm == "planned":
    graph = capture(model, optimizer, batch, loss=loss_of)
    found = plan(graph, device_memory=allowed // 2, store=store, machine="h200", time_limit=2)
torch.manual_seed(1)
before = memory_bytes("VmRSS")
if arm == "planned":
    step = bind(found, model, optimizer, graph=graph, loss=loss_of, store=store)
    losses = [step(batch).item() for _ in range(STEPS)]
    grown = memory_bytes("VmHWM") - before
    assert grown < allowed, grown  # pages of the file are not kept in memory either
    step.close()
    penstock.executor.save_safetensors(model.state_dict(), out)
else:
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    penstock.executor.save_safetensors(model.state_dict(), out)
print(json.dumps({"losses": losses, "state_bytes": state_bytes}))
"""


def in_a_process(arm, store, allowed, out):
    return subprocess.run(
        [
            find_python("dynamo"),
            "-c",
            textwrap.dedent(CHILD),
            arm,
            str(store),
            str(allowed),
            str(out),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_a_model_of_twice_the_memory_that_the_kernel_allows(store, tmp_path):
    """Parameters and AdamW's state are in the file; in memory, the same training is refused."""
    allowed, out = 120 * 2**20, tmp_path / "out.safetensors"
    free = in_a_process("free", store, allowed, out)
    expected = json.loads(free.stdout)
    assert expected["state_bytes"] >= 2 * allowed
    weights = load_file(out)
    out.unlink()
    limited = in_a_process("limited", store, allowed, out)
    assert limited.returncode != 0
    assert "memory" in limited.stderr
    planned = in_a_process("planned", store, allowed, out)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout) == expected
    assert differences(weights, load_file(out), "") == []
