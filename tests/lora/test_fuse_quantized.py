"""Bases that are quantised: their weights are dequantised by blocks of rows."""

import pytest
import torch
from torch.utils._pytree import tree_map

pytest.importorskip("peft")

from _peft_models import assert_same, gradients
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.torchao import TorchaoLoraLinear
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from penstock.lora import _quantized, fuse, fuse_report, unfuse

OUT, IN = 200, 64


class _Int8Rows(torch.Tensor):
    """A weight of int8 with a scale for each row, in the manner of torchao's tensors."""

    dequantized: list[int] = []  # noqa: RUF012
    can_slice = True

    @staticmethod
    def __new__(cls, values, scales):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values, scales):
        self.values, self.scales = values, scales

    def dequantize(self):
        self.dequantized.append(len(self.values))
        return self.values.float() * self.scales

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func is aten.detach.default:
            return cls(args[0].values, args[0].scales)
        if func is aten.slice.Tensor and args[1] == 0 and cls.can_slice:
            return cls(*(func(each, *args[1:]) for each in (args[0].values, args[0].scales)))
        if func is aten.slice.Tensor:
            raise NotImplementedError("slices")
        dense = tree_map(
            lambda x: x.dequantize() if isinstance(x, _Int8Rows) else x, (args, kwargs)
        )
        return func(*dense[0], **(dense[1] or {}))


class _Whole(_Int8Rows):
    can_slice = False


class _WithInput(_Int8Rows):
    act_quant_kwargs = "of the input"


def _model(kind=_Int8Rows):
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(IN, OUT))
    config = LoraConfig(target_modules=["0"], r=4, init_lora_weights=False)
    model = get_peft_model(base, config)
    layer = model.base_model.model[0].base_layer
    values = torch.randint(-128, 128, (OUT, IN), dtype=torch.int8)
    weight = kind(values, torch.rand(OUT, 1) / 100)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model, weight


def _step(model):
    torch.manual_seed(1)
    x = torch.randn(2, 5, IN, requires_grad=True)
    y = model(x)
    y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad, **gradients(model)}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(_quantized, "_BLOCK_ELEMENTS", 64 * IN)
    monkeypatch.setattr(_quantized, "_can_split", {})


@pytest.mark.usefixtures("small_blocks")
def test_no_whole_weight_is_dequantised():
    model, weight = _model()
    expected = _step(model)
    assert len(fuse_report(fuse(model)).fused) == 1
    _Int8Rows.dequantized.clear()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = model(torch.randn(10, IN, requires_grad=True))
    assert {tuple(tensor.shape) for tensor in kept} >= {(OUT, IN)}
    assert [t for t in kept if t.shape == (OUT, IN) and not isinstance(t, _Int8Rows)] == []
    assert _Int8Rows.dequantized == [64, 64, 64, 8]
    y.sum().backward()
    gradients(model)
    assert _Int8Rows.dequantized == [64, 64, 64, 8] * 2
    assert_same(_step(model), expected, tolerance=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(3, IN)).dtype == torch.bfloat16
    assert weight.dequantize().shape == (OUT, IN)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", [_Whole, _WithInput])
def test_other_quantised_weights_are_called_as_they_are(kind):
    model, _ = _model(kind)
    expected = _step(model)
    assert kind.__name__ in str(fuse_report(fuse(model)).added)
    assert_same(_step(model), expected, tolerance=1e-6)


@pytest.mark.usefixtures("small_blocks")
def test_plain_weights_of_a_captured_step_are_not_tried():
    with FakeTensorMode():
        assert not _quantized.can_split_rows(torch.randn(8, 8))
    assert FakeTensor not in _quantized._can_split


def test_layers_of_peft_for_torchao_are_fused():
    model, _ = _model()
    layer = model.base_model.model[0]
    layer.__class__ = TorchaoLoraLinear  # whose own constructor asks for torchao
    layer.get_apply_tensor_subclass = None
    expected = _step(model)
    assert len(fuse_report(fuse(model)).fused) == 1
    assert isinstance(layer, TorchaoLoraLinear)
    assert_same(_step(model), expected, tolerance=1e-6)
    assert type(unfuse(model).base_model.model[0]) is TorchaoLoraLinear


def test_weights_of_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(IN, OUT))
    quantization.quantize_(base, quantization.Int8WeightOnlyConfig())
    model = get_peft_model(base, LoraConfig(target_modules=["0"], init_lora_weights=False))
    expected = _step(model)
    assert len(fuse_report(fuse(model)).fused) == 1
    assert_same(_step(model), expected, tolerance=1e-6)


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
def test_layers_of_bitsandbytes_add_their_adapters(kind):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    base = torch.nn.Sequential(getattr(bitsandbytes.nn, kind)(64, 128)).to("cpu")
    base.is_loaded_in_4bit = kind == "Linear4bit"  # as Transformers leaves a model
    base.is_loaded_in_8bit = not base.is_loaded_in_4bit
    config = LoraConfig(target_modules=["0"], init_lora_weights=False, lora_dropout=0.0)
    model = get_peft_model(base, config)
    model.add_adapter("other", config)
    x = torch.randn(4, 64)

    def outputs(name):
        model.set_adapter(name)
        y = model(x)
        y.square().sum().backward()
        layer = model.base_model.model[0]
        gradients = [each[name].weight.grad.clone() for each in (layer.lora_A, layer.lora_B)]
        model.zero_grad()
        return [y.detach(), *gradients]

    expected = {name: outputs(name) for name in ("default", "other")}
    assert kind in str(fuse_report(fuse(model)).added)
    for name, found in expected.items():
        for ours, theirs in zip(outputs(name), found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    model.base_model.set_adapter(["default", "other"])
    mixed = model(x, adapter_names=["default", "other", "default", "other"])  # PEFT refuses it
    torch.testing.assert_close(mixed[0::2], expected["default"][0][0::2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mixed[1::2], expected["other"][0][1::2], rtol=1e-5, atol=1e-6)
    assert type(unfuse(model).base_model.model[0]).__name__ == kind
