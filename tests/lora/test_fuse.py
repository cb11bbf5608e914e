"""`penstock.lora.fuse`: stock PEFT's results from fewer saved bytes, and PEFT's own functions."""

import copy
import io
import pickle
import sys
import warnings
from collections import Counter

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

from _peft_models import MAKERS, assert_same, backward, gradients, make, make_batch, twin
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from peft.tuners.lora.layer import Linear

from penstock.lora import FuseReport, _fused_layer, fuse, fuse_report, linear, unfuse
from penstock.lora._dropout import keep
from penstock.lora._fused_layer import draw_seeds

BATCH = make_batch()


@pytest.mark.parametrize("kind", MAKERS)
def test_training_equals_peft(kind):
    stock, fused = make(kind), fuse(make(kind))
    assert len(fuse_report(fused).fused) >= 8 and not fuse_report(fused).stock
    steppers = [
        torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4, fused=True
        )
        for model in (stock, fused)
    ]
    for step in range(50):
        batch = make_batch(kind, step)
        losses = []
        for model, stepper in zip((stock, fused), steppers, strict=True):
            loss = model(**batch).loss
            loss.backward()
            stepper.step()
            stepper.zero_grad()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert_same(dict(fused.state_dict()), dict(stock.state_dict()), tolerance=1e-6)


class _OurMask(torch.nn.Module):
    """PEFT's dropout with the mask that a fused layer makes from the same random state."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        rows = x.flatten(0, -2)
        mask = keep(int(draw_seeds(1)), 0, *rows.shape, self.p, x.device).view(x.shape)
        return x * mask / (1 - self.p)


@pytest.mark.parametrize("kind", MAKERS)
def test_dropout_is_that_of_the_mask(kind):
    stock = make(kind, lora_dropout=0.3).double()
    fused = fuse(twin(stock))
    for module in stock.modules():
        if isinstance(module, Linear):
            module.lora_dropout["default"] = _OurMask(0.3)
    batch = make_batch(kind, dtype=torch.float64)
    for seed in range(3):
        assert_same(backward(fused, seed, **batch), backward(stock, seed, **batch), tolerance=1e-6)


def test_masks_are_new_in_every_layer_and_step_and_in_none_of_evaluation():
    torch.manual_seed(0)
    base = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
    model = fuse(get_peft_model(base, LoraConfig(target_modules=["0", "1"], lora_dropout=0.5)))
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    for layer in layers:
        torch.nn.init.ones_(layer.lora_B["default"].weight)
    x = torch.randn(4, 8)
    layers[1].load_state_dict(layers[0].state_dict())
    torch.manual_seed(1)
    first, second = layers[0](x), layers[1](x)
    assert not torch.equal(first, second)
    assert not torch.equal(first, layers[0](x))
    torch.manual_seed(1)
    assert torch.equal(first, layers[0](x))
    model.eval()
    assert torch.equal(layers[0](x), layers[0](x))
    assert torch.allclose(layers[0](x), super(type(layers[0]), layers[0]).forward(x), atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_layer_keeps_its_input_and_the_product_of_rank_r(dropout):
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(32, 24))
    model = fuse(get_peft_model(base, LoraConfig(target_modules=["0"], r=4, lora_dropout=dropout)))
    x = torch.randn(5, 6, 32, requires_grad=True)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        model(x)
    kept = [t for t in kept if t.untyped_storage().data_ptr() not in parameters]
    assert sorted(t.numel() for t in kept if t.dtype == torch.float32) == [30 * 4, 30 * 32]
    assert {t.untyped_storage().data_ptr() for t in kept} >= {x.untyped_storage().data_ptr()}
    assert sum(t.nbytes for t in kept if t.dtype != torch.float32) <= 8  # the seed


def test_evaluation_equals_peft():
    stock, fused = make(lora_dropout=0.1).eval(), fuse(make(lora_dropout=0.1)).eval()
    with torch.no_grad():
        assert torch.allclose(fused(**BATCH).logits, stock(**BATCH).logits, atol=1e-6)


def test_short_inputs_of_evaluation_are_peft(monkeypatch):
    """As those of a token at a time, where the operator's arguments take longer than its work."""
    calls = []
    monkeypatch.setattr(_fused_layer, "linear", lambda *a, **k: calls.append(1) or linear(*a, **k))
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model = get_peft_model(
        base, LoraConfig(target_modules=["0"], lora_dropout=0.5, init_lora_weights=False)
    )
    stock = twin(model).eval()
    fuse(model).eval()
    x, many = torch.randn(4, 8), torch.randn(4096, 8)
    with torch.no_grad():
        assert torch.equal(model(x), stock(x)) and not calls
        torch.testing.assert_close(model(many), stock(many))
        assert len(calls) == 1
        model.train()(x)
        model.eval().base_model.model[0].lora_dropout.train()
        model(x)
    assert len(calls) == 3
    model.eval()(x)
    assert len(calls) == 4


def test_several_active_adapters_add_up():
    stock, fused = make(second={"r": 2}), fuse(make(second={"r": 2}))
    assert_same(backward(fused, **BATCH), backward(stock, **BATCH), tolerance=1e-6)
    stock.base_model.set_adapter(["other"])
    fused.base_model.set_adapter(["other"])
    assert_same(backward(fused, **BATCH), backward(stock, **BATCH), tolerance=1e-6)


def test_float32_adapters_on_a_bfloat16_base():
    stock = make(lora_dropout=0.0).to(torch.bfloat16)
    for module in stock.modules():
        if isinstance(module, Linear):
            module.lora_A.float()
            module.lora_B.float()
    fused = fuse(twin(stock))
    found, expected = backward(fused, **BATCH), backward(stock, **BATCH)
    assert_same(found, expected, tolerance=0.02)  # three digits of bfloat16
    assert fused.base_model.model.model.layers[0].mlp.up_proj(
        torch.randn(2, 32, dtype=torch.bfloat16)
    ).dtype == torch.bfloat16  # fmt: skip


def test_autocast():
    stock, fused = make(), fuse(make())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = backward(fused, **BATCH), backward(stock, **BATCH)
    assert_same(found, expected, tolerance=0.02)
    layer = fused.base_model.model.model.layers[0].mlp.up_proj
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 32)).dtype == torch.bfloat16


def test_state_and_files_are_those_of_peft(tmp_path):
    stock, fused = make(), fuse(make())
    assert list(fused.state_dict()) == list(stock.state_dict())
    assert fuse(make()).to(torch.float64)(**BATCH).logits.dtype == torch.float64
    fused.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(MAKERS["llama"](), tmp_path)  # another base
    loaded.load_state_dict(stock.state_dict())
    assert torch.allclose(loaded(**BATCH).loss, fused(**BATCH).loss, atol=1e-6)
    again = fuse(make(init_lora_weights=True))
    again.load_adapter(tmp_path, "saved")
    again.set_adapter("saved")
    assert torch.equal(again(**BATCH).loss, fused(**BATCH).loss)


def test_a_later_adapter_is_fused_with_its_layers():
    fused, stock = fuse(make(target_modules=["q_proj"])), make(target_modules=["q_proj"])
    for model in (fused, stock):
        torch.manual_seed(3)
        model.add_adapter(
            "new", LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
        )
        model.set_adapter("new")
    assert len(fuse_report(fused).fused) == 4
    assert_same(backward(fused, **BATCH), backward(stock, **BATCH), tolerance=1e-6)
    for model in (fused, stock):
        model.delete_adapter("default")
    assert_same(backward(fused, **BATCH), backward(stock, **BATCH), tolerance=1e-6)


def test_merge_disable_and_unload():
    fused = fuse(make()).eval()
    with torch.no_grad():
        expected = fused(**BATCH).logits
        with fused.disable_adapter():
            base = fused(**BATCH).logits
        assert not torch.allclose(base, expected, atol=1e-3)
        fused.merge_adapter()
        assert torch.allclose(fused(**BATCH).logits, expected, atol=1e-5)
        fused.unmerge_adapter()
        assert torch.allclose(fused(**BATCH).logits, expected, atol=1e-5)
        plain = fused.merge_and_unload()
        assert not any(isinstance(module, Linear) for module in plain.modules())
        assert torch.allclose(plain(**BATCH).logits, expected, atol=1e-5)


def test_modules_to_save():
    stock = make("vit", target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    fused = fuse(twin(stock))
    batch = make_batch("vit")
    found = backward(fused, **batch)
    assert any("modules_to_save" in name for name in found)
    assert_same(found, backward(stock, **batch), tolerance=1e-6)


def test_copies_and_pickles_are_fused():
    fused = fuse(make(modules_to_save=["lm_head"], target_modules=["q_proj"]))
    expected = backward(fused, **BATCH)
    for copied in (
        copy.deepcopy(fused),
        pickle.loads(pickle.dumps(fused)),
        torch.load(_saved(fused), weights_only=False),
    ):
        assert len(fuse_report(copied).fused) == 2
        assert_same(backward(copied, **BATCH), expected)


def _saved(model: torch.nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_unfuse_gives_peft_back():
    model = make(modules_to_save=["lm_head"], target_modules=["q_proj"])
    types = [type(module) for module in model.modules()]
    expected = backward(model, **BATCH)
    assert fuse(model) is model and fuse(model) is model
    assert any(
        type(module) is not kind for module, kind in zip(model.modules(), types, strict=True)
    )
    assert unfuse(model) is model and unfuse(model) is model
    assert [type(module) for module in model.modules()] == types
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert_same(backward(model, **BATCH), expected)
    model.train()
    with pytest.raises(ValueError, match="training mode"):
        model(**BATCH, adapter_names=["default"] * 3)


def test_the_report_counts_and_names():
    model = fuse(make(target_modules=["q_proj", "v_proj", "embed_tokens"]))
    report = fuse_report(model)
    assert len(report.fused) == 4
    assert list(report.stock.values()) == ["the layer is PEFT's Embedding"]
    assert report.to_dict()["fused"] == report.fused
    assert isinstance(report, FuseReport) and "PEFT's Embedding" in str(report)


def test_variants_are_peft():
    stock = make(second={"use_dora": True}, target_modules=["q_proj"])
    fused = fuse(twin(stock))
    report = fuse_report(fused)
    assert not report.fused and "'other' is a variant of LoRA, Dora" in str(report.stock)
    assert_same(backward(fused, **BATCH), backward(stock, **BATCH), tolerance=1e-6)
    fused.base_model.set_adapter(["default"])
    with _CallCounter() as counter:
        fused(**BATCH)
    assert counter.calls["penstock.lora_forward.default"] == 2


def test_a_bias_of_the_adapter_is_peft():
    stock = make("bert", lora_bias=True)
    fused = fuse(twin(stock))
    assert "has a bias" in str(fuse_report(fused).stock)
    batch = make_batch("bert")
    assert_same(backward(fused, **batch), backward(stock, **batch), tolerance=1e-6)


class _CallCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("of", ["lora_A", "lora_B", "lora_dropout"])
@pytest.mark.parametrize("how", ["hook", "hook later", "forward", "replaced"])
def test_submodules_that_are_watched_are_called(of, how):
    stock = make(target_modules=["q_proj"], lora_dropout=0.1).eval()
    fused = twin(stock)
    calls = []

    def watch(model):
        submodules = getattr(model.base_model.model.model.layers[0].self_attn.q_proj, of)
        submodule = submodules["default"]
        if how.startswith("hook"):
            submodule.register_forward_hook(lambda _, args, y: calls.append(1) or 2 * y)
        elif how == "forward":
            old = submodule.forward
            submodule.forward = lambda x: calls.append(1) or 2 * old(x)
        else:
            submodules["default"] = _Doubled(submodule, calls)

    watch(stock)
    if how != "hook later":
        watch(fused)
    fuse(fused)
    if how == "hook later":
        watch(fused)
    expected = stock(**BATCH).logits
    assert torch.allclose(fused(**BATCH).logits, expected, atol=1e-6)
    assert len(calls) == 2
    report = fuse_report(fused)
    assert len(report.fused) == len(report.stock) == 1 and of in str(report.stock)


class _Doubled(torch.nn.Module):
    def __init__(self, inner, calls):
        super().__init__()
        self.inner, self.calls = inner, calls
        self.weight, self.bias = getattr(inner, "weight", None), None

    def forward(self, x):
        self.calls.append(1)
        return 2 * self.inner(x)


@pytest.mark.parametrize("how", ["hook", "subclass", "forward"])
def test_a_base_layer_that_is_watched_is_called(how):
    stock = make(target_modules=["q_proj"], lora_dropout=0.0)
    fused = fuse(twin(stock))
    calls = []
    for model in (stock, fused):
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        if how == "hook":
            layer.base_layer.register_forward_hook(lambda _, args, y: calls.append(1) or 2 * y)
        elif how == "forward":
            old = layer.base_layer.forward
            layer.base_layer.forward = lambda x, old=old: calls.append(1) or 2 * old(x)
        else:
            layer.base_layer.__class__ = _DoubledLinear
            _DoubledLinear.calls = calls
    report = fuse_report(fused)
    assert len(report.fused) == len(report.added) == 1
    assert_same(backward(fused, **BATCH), backward(stock, **BATCH), tolerance=1e-6)
    assert len(calls) == 2


class _DoubledLinear(torch.nn.Linear):
    def forward(self, x):
        self.calls.append(1)
        return 2 * super().forward(x)


def test_a_layer_with_a_forward_of_its_own_is_left():
    model = make(target_modules=["q_proj"])
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.forward = lambda x: layer.base_layer(x)
    report = fuse_report(fuse(model))
    assert len(report.fused) == 1
    assert list(report.stock.values()) == ["the layer has a forward of its own"]


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (lambda: torch.nn.Linear(4, 4), "is a Linear; accepted is what peft.get_peft_model"),
        (lambda: torch.nn.DataParallel(make()), "before it is wrapped"),
        (
            lambda: get_peft_model(
                MAKERS["llama"](),
                PromptTuningConfig(
                    num_virtual_tokens=2, task_type="CAUSAL_LM", num_layers=2, token_dim=32,
                    num_attention_heads=4, num_transformer_submodules=1,
                ),
            ),
            "with the method PROMPT_TUNING; .* make its adapter with a LoraConfig",
        ),
        (
            lambda: get_peft_model(MAKERS["llama"](), IA3Config(task_type="CAUSAL_LM")),
            "with the method IA3; .* train this one without fuse",
        ),
        (
            lambda: get_peft_model(
                MAKERS["llama"](),
                PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
            ),
            "with the method PREFIX_TUNING",
        ),
        (
            lambda: _with_add_adapter(MAKERS["llama"]()),
            r"LlamaForCausalLM in which adapters .*peft.get_peft_model\(base, config\)",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("function", [fuse, unfuse, fuse_report])
def test_other_models_are_refused(function, model, match):
    with pytest.raises(TypeError, match=match):
        function(model())


def _with_add_adapter(model):
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    return model


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match=r"no LoRA layer of PEFT's class Linear"):
        fuse(make(target_modules=["embed_tokens"]))


def test_one_dimension_is_peft():
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model = get_peft_model(base, LoraConfig(target_modules=["0"], init_lora_weights=False))
    x = torch.randn(8)
    expected = model(x)
    assert torch.equal(fuse(model)(x), expected)
    model(torch.randn(0, 8)).sum().backward()
    assert all(not gradient.any() for gradient in gradients(model).values())


def _nest(x):
    return torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)


@pytest.mark.parametrize("form", [_nest, torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_inputs_without_strides_are_peft(form):
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model = get_peft_model(base, LoraConfig(target_modules=["0"], init_lora_weights=False))
    x = form(torch.randn(5, 8).relu())
    expected = model(x)
    found = fuse(model)(x)
    if expected.is_nested:
        found, expected = found.values(), expected.values()
    assert torch.equal(found, expected)
    with pytest.raises(TypeError, match="x is nested, sparse or of a layout without strides"):
        linear(x, torch.randn(8, 8), None, [], [-1] * 5, seed=0)


@pytest.mark.parametrize("scaling", [torch.tensor(2.0, requires_grad=True), float("inf")])
def test_a_scaling_that_is_no_finite_number_is_peft(scaling):
    model = fuse(make(target_modules=["q_proj"]))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.scaling["default"] = scaling
    report = fuse_report(model)
    assert len(report.fused) == 1 and "no finite number" in str(report.stock)
    loss = model(**BATCH).loss
    loss.backward()
    if isinstance(scaling, torch.Tensor):
        assert scaling.grad is not None
    assert torch.equal(loss, unfuse(model)(**BATCH).loss)


def test_layers_within_attention_of_torch_are_reported_as_peft():
    attention = torch.nn.MultiheadAttention(16, 2)
    base = torch.nn.ModuleDict({"attention": attention, "out": torch.nn.Linear(16, 16)})
    report = fuse_report(
        fuse(get_peft_model(base, LoraConfig(target_modules=["attention", "out"])))
    )
    assert report.fused == ("base_model.model.out",) and not report.added
    assert "does not call it" in report.stock["base_model.model.attention.base_layer.out_proj"]


def test_traced_by_torch_jit():
    model = fuse(make("bert", target_modules=["dense"])).eval()
    dense = model.base_model.model.bert.encoder.layer[0].output.dense
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(dense, torch.randn(3, 48))
    x = torch.randn(5, 48)
    torch.testing.assert_close(traced(x), dense(x))


def test_dropout_under_vmap_is_drawn_as_it_says():
    layer = fuse(make(target_modules=["q_proj"], lora_dropout=0.5))
    layer = layer.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(2, 32).expand(4, 2, 32)
    same = torch.func.vmap(layer, randomness="same")(x)
    assert torch.equal(same[0], same[1])
    different = torch.func.vmap(layer, randomness="different")(x)
    assert not torch.allclose(different[0], different[1])


@pytest.mark.parametrize("function", [fuse, unfuse, fuse_report])
def test_without_peft_it_is_said_what_to_install(function, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match="pip install peft"):
        function(torch.nn.Linear(2, 2))
