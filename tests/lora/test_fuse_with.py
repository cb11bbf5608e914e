"""Fused models under `torch.compile`, DDP, `penstock.offload` and `penstock.fit`."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("peft")
pytest.importorskip("transformers")

from _peft_models import assert_same, backward, gradients, make, make_batch, twin
from _peft_ranks import expected_gradients, train_with_names
from peft import LoraConfig, get_peft_model

import penstock
from _planned import MACHINE
from _ranks import needs_gloo, spawn
from _waiting import wait_until
from penstock.lora import fuse

BATCH = make_batch()
# torch's compiler looks for gradients of tensors that have none where it cuts a graph.
of_compiler = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class _Layers(torch.nn.Module):
    """Two layers, of which the second may be recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.use_reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        if self.use_reentrant is None:
            return self.second(y)
        return checkpoint(self.second, y, use_reentrant=self.use_reentrant)


def _two_layers(dropout: float = 0.0):
    torch.manual_seed(0)
    config = LoraConfig(
        target_modules=["first", "second"], r=2, lora_dropout=dropout, init_lora_weights=False
    )
    model = get_peft_model(_Layers(), config)
    model.add_adapter("other", config)
    model.set_adapter("default")
    return fuse(model)


def _step(model, x, seed=0, **arguments):
    torch.manual_seed(seed)
    y = model(x, **arguments)
    y.square().sum().backward()
    return {"y": y.detach(), **gradients(getattr(model, "_orig_mod", model))}


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("saving", [None, False])
def test_compiled_in_one_graph_with_new_masks_in_each_step(saving):
    model = _two_layers(dropout=0.3)
    model.base_model.model.use_reentrant = saving
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(6, 8)
    for seed in range(2):
        assert_same(_step(compiled, x, seed), _step(model, x, seed), tolerance=1e-6)
    assert not torch.equal(compiled(x), compiled(x))
    model.base_model.set_adapter(["default", "other"])
    assert_same(_step(compiled, x), _step(model, x), tolerance=1e-6)


@of_compiler
def test_names_under_compile():
    model = _two_layers()
    model.base_model.set_adapter(["default", "other"])
    plain = twin(model)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(3, 8)
    for arguments in ({"adapter_names": ["default", "other", "__base__"]}, {}):
        expected = _step(plain, x, **arguments)
        assert_same(_step(compiled, x, **arguments), expected, tolerance=1e-6)


@of_compiler
@pytest.mark.parametrize("saving", [False, True])
def test_names_where_compiled_layers_are_recomputed(saving):
    model = _two_layers()
    model.base_model.set_adapter(["default", "other"])
    plain = twin(model)
    model.base_model.model.use_reentrant = saving
    x = torch.randn(3, 8)
    model.base_model.model.second.compile(backend="aot_eager")
    for names in (None, ["default", "other", "__base__"], ["other", "other", "default"], None):
        arguments = {} if names is None else {"adapter_names": names}
        expected = _step(plain, x, **arguments)
        assert_same(_step(model, x, **arguments), expected, tolerance=1e-6)


def test_offloaded(store):
    plain, moved = fuse(make(lora_dropout=0.1)), fuse(make(lora_dropout=0.1))
    expected = backward(plain, **BATCH)
    torch.manual_seed(0)
    with penstock.offload(store, policy="all", min_bytes=1) as session:
        loss = moved(**BATCH).loss
        wait_until(lambda: session.report().bytes_written > 0)
        loss.backward()
    assert_same({"loss": loss.detach(), **gradients(moved)}, expected)


@pytest.mark.parametrize("saving", [False, True])
def test_planned_steps_draw_new_masks(saving):
    torch.manual_seed(0)
    models = [_two_layers(dropout=0.3) for _ in range(2)]
    # Nothing is learned: losses differ by the masks alone.
    steppers = [torch.optim.AdamW(m.parameters(), lr=0.0) for m in models]
    for model in models:
        model.base_model.model.use_reentrant = False if saving else None
    x = torch.randn(16, 8)
    options = {"machine": MACHINE, "time_limit": 0.2, "cache": False, "device_memory": "64MiB"}
    with penstock.fit(
        models[0], steppers[0], x, loss=lambda y, _: y.square().mean(), **options
    ) as step:
        torch.manual_seed(1)
        found = [step(x).item() for _ in range(4)]
    torch.manual_seed(1)
    expected = []
    for _ in range(4):
        loss = models[1](x).square().mean()
        loss.backward()
        steppers[1].step()
        steppers[1].zero_grad()
        expected.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(set(found)) == 4


def test_planned_steps_are_fused_as_eager_ones_are():
    """Otherwise their last bits differ: the product of the base would be added afterwards."""
    model = _two_layers()
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(16, 8)
    graph = penstock.capture(model, stepper, batch, loss=lambda y, _: y.square().mean())
    targets = [each.target for each in graph.operators]
    assert sum("lora_forward" in target for target in targets) == 2
    assert not any("addmm" in target for target in targets)


@needs_gloo
def test_two_ranks(tmp_path):
    ranks = spawn(train_with_names, 2, tmp_path)
    assert ranks[0][0]["seed"] != ranks[1][0]["seed"]
    for step, expected in enumerate(expected_gradients()):
        assert len(expected) == 2 * 2 * 14
        for rank in ranks:
            assert_same(rank[1 + step], expected, tolerance=1e-6)
