"""`adapter_names` in training, and the settings of a pass that checkpointing runs again."""

import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("peft")
pytest.importorskip("transformers")

from _peft_models import MAKERS, assert_same, backward, gradients, make, make_batch, twin
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear

from penstock.lora import _settings, fuse, fuse_report, unfuse
from penstock.lora._settings import AdapterNames

BATCH = make_batch()
NAMES = ["other", "__base__", "default"]
SECOND = {"r": 2, "lora_alpha": 3}


def _pick(batch, index):
    return {name: tensor[index : index + 1] for name, tensor in batch.items()}


def _separate_passes(stock, batch, names):
    """Return the loss and gradients of PEFT's own passes, sample by sample."""
    total = torch.zeros(())
    for index, name in enumerate(names):
        if name == "__base__":
            with stock.disable_adapter():
                loss = stock(**_pick(batch, index)).loss
        else:
            stock.base_model.set_adapter([name])
            loss = stock(**_pick(batch, index)).loss
        loss = loss / len(names)  # each sample has as many tokens
        if loss.requires_grad:
            loss.backward()
        total += loss.detach()
    return {"loss": total, **gradients(stock)}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_mixed_batch_equals_separate_passes_of_peft(kind):
    stock = make(kind, second=SECOND).double()
    fused = fuse(twin(stock))
    batch = make_batch(kind, dtype=torch.float64)
    for names in (NAMES, ["other"] * 3, ["other", "default", "other"]):
        expected = _separate_passes(stock, batch, names)
        found = backward(fused, **batch, adapter_names=names)
        assert_same(found, expected, tolerance=1e-6)
        fused.base_model.set_adapter(["default", "other"])


def test_evaluation_equals_peft():
    stock = make(second=SECOND).eval()
    fused = fuse(twin(stock))
    with torch.no_grad():
        expected = stock(**BATCH, adapter_names=NAMES).logits
        assert torch.allclose(fused(**BATCH, adapter_names=NAMES).logits, expected, atol=1e-6)
        tokens = {"input_ids": BATCH["input_ids"], "max_new_tokens": 3, "do_sample": False}
        for more in ({}, {"num_beams": 2}):
            assert torch.equal(
                fused.generate(**tokens, **more, adapter_names=NAMES, pad_token_id=0),
                stock.generate(**tokens, **more, adapter_names=NAMES, pad_token_id=0),
            )


def test_layers_of_peft_get_the_names_too():
    targets = ["q_proj", "v_proj", "embed_tokens"]
    stock = make(second=SECOND, target_modules=targets)
    fused = twin(stock)
    block = fused.base_model.model.model.layers[0].self_attn
    block.q_proj.lora_A["other"].register_forward_hook(lambda *_: None)
    block.v_proj.forward = types.MethodType(Linear.forward, block.v_proj)
    fuse(fused)
    assert len(fuse_report(fused).stock) == 3
    expected = _separate_passes(stock, BATCH, NAMES)
    assert_same(backward(fused, **BATCH, adapter_names=NAMES), expected, tolerance=1e-6)
    _checkpoint_layers(fused, use_reentrant=False)
    assert_same(backward(fused, **BATCH, adapter_names=NAMES), expected, tolerance=1e-6)


def test_modules_to_save_get_the_names_too():
    stock = make("vit", target_modules=["q_proj"], modules_to_save=["classifier"])
    stock.add_adapter(
        "other",
        LoraConfig(
            target_modules=["q_proj"], modules_to_save=["classifier"], init_lora_weights=False
        ),
    )
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    fused = fuse(twin(stock))
    batch = make_batch("vit")
    stock.eval()
    expected = stock(**batch, adapter_names=NAMES).logits
    assert torch.allclose(fused(**batch, adapter_names=NAMES).logits, expected, atol=1e-6)


def test_rows_are_grouped_once_for_all_layers(monkeypatch):
    fused = fuse(make(second=SECOND))
    calls = []
    expand = _settings._expand
    monkeypatch.setattr(_settings, "_expand", lambda *args: calls.append(args) or expand(*args))
    fused(**BATCH, adapter_names=NAMES)
    assert len(calls) == 1


def test_rows_of_a_sample_lie_together():
    names = AdapterNames(["b", "a", "__base__", "b"])
    used, rows = names.group_rows(["a", "b", "c"], torch.zeros(4, 2, 5))
    assert used == ("a", "b")
    assert rows.counts == (2, 4) and rows.starts == (2, -1)
    assert rows.order.tolist() == [2, 3, 0, 1, 6, 7]
    assert names.group_rows(["c"], torch.zeros(4, 2, 5))[1].counts == ()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"adapter_names": ["default", "wrong", "other"]}, ValueError, "has 'wrong'; the adapters"),
        ({"adapter_names": ["default"] * 2}, ValueError, "2 names for a batch of 3 samples"),
        ({"adapter_names": "default"}, TypeError, "accepted is a list"),
        ({"adapter_names": ["default", 1, "other"]}, TypeError, "accepted is a list"),
        ({"adapter_names": NAMES, "alora_offsets": [1] * 3}, ValueError, "alora_offsets and"),
        ({"adapter_names": NAMES, "num_beams": 2}, ValueError, "num_beams and"),
    ],
)
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_wrong_names_are_refused_before_anything_runs(arguments, error, match, task):
    fused = fuse(make(second=SECOND, task_type=task))
    ran = []
    fused.base_model.model.model.embed_tokens.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(error, match=match):
        fused(**BATCH, **arguments)
    assert not ran
    assert not any(module._forward_pre_hooks for module in fused.modules())
    assert torch.equal(fused(**BATCH).loss, fused(**BATCH).loss)


def test_merged_adapters_and_dora_are_refused():
    fused = fuse(make(second={"use_dora": True}))
    with pytest.raises(ValueError, match="'other', which uses DoRA"):
        fused(**BATCH, adapter_names=NAMES)
    fused.merge_adapter(["default"])
    with pytest.raises(ValueError, match="unmerge_adapter"):
        fused(**BATCH, adapter_names=["default"] * 3)


def test_a_failed_pass_leaves_no_names():
    fused = fuse(make(second=SECOND))
    expected = fused(**BATCH).loss
    last = fused.base_model.model.lm_head
    handle = last.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fused(**BATCH, adapter_names=NAMES)
    handle.remove()
    assert torch.equal(fused(**BATCH).loss, expected)


def test_an_adapter_that_is_not_trained_is_named(caplog):
    fused = fuse(make(second=SECOND))
    fused.add_adapter("frozen one", LoraConfig(target_modules=["q_proj"]))
    fused(**BATCH, adapter_names=NAMES)
    assert not caplog.records
    fused(**BATCH, adapter_names=["frozen one", "other", "default"])
    assert "'frozen one', none of whose parameters" in caplog.text


def _checkpoint_layers(model, **arguments):
    """Have the model's blocks recomputed in the backward pass."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    model.enable_input_require_grads()
    (enable or model.gradient_checkpointing_enable)(arguments)


@pytest.fixture
def count_calls(monkeypatch):
    """Count calls of LoRA layers of PEFT's and ours."""
    calls = []
    from penstock.lora._fused_layer import FusedLayer

    inner = FusedLayer._add_adapters
    monkeypatch.setattr(
        FusedLayer, "_add_adapters", lambda *a, **k: calls.append(1) or inner(*a, **k)
    )
    return calls


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("names", [None, NAMES])
def test_checkpointing_recomputes_the_same(use_reentrant, names, dropout, count_calls):
    plain = fuse(make(second=SECOND, lora_dropout=dropout))
    saving = twin(plain)
    _checkpoint_layers(saving, use_reentrant=use_reentrant)
    plain.enable_input_require_grads()
    for seed in range(2):
        count_calls.clear()
        found = backward(saving, seed, **BATCH, adapter_names=names)
        assert len(count_calls) == 2 * 14
        assert_same(found, backward(plain, seed, **BATCH, adapter_names=names))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_settings_that_change_before_the_backward_pass(use_reentrant):
    plain = fuse(make(second=SECOND))
    saving = twin(plain)
    _checkpoint_layers(saving, use_reentrant=use_reentrant)
    plain.enable_input_require_grads()
    found = []
    for model in (plain, saving):
        total = torch.zeros(())
        for names in (["default"], ["other"], ["other", "default"]):
            model.base_model.set_adapter(names)
            total = total + model(**BATCH).loss
        for names in (NAMES, NAMES[::-1]):
            total = total + model(**BATCH, adapter_names=names).loss
        with model.disable_adapter():
            total = total + model(**BATCH).loss
        model.base_model.set_adapter(["other", "default"])
        total.backward()
        found.append({"loss": total.detach(), **gradients(model)})
        assert len(found[-1]) == 1 + 2 * 2 * 14
    assert_same(found[1], found[0], tolerance=1e-6)  # sums in another order


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_whole_model_in_a_checkpoint(use_reentrant):
    fused = fuse(make(second=SECOND, lora_dropout=0.1))
    fused.enable_input_require_grads()
    embeds = torch.randn(3, 7, 32, requires_grad=True)

    def run(x, names):
        return fused(inputs_embeds=x, labels=BATCH["labels"], adapter_names=names).loss

    found = []
    for again in (True, False):
        torch.manual_seed(0)
        losses = [
            checkpoint(run, embeds, names, use_reentrant=use_reentrant)
            if again
            else run(embeds, names)
            for names in (NAMES, None, NAMES[::-1])
        ]
        sum(losses).backward()
        found.append(gradients(fused))
    assert_same(found[0], found[1], tolerance=1e-6)


def test_another_random_state_in_the_recomputation_is_refused():
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model = get_peft_model(base, LoraConfig(target_modules=["0"], lora_dropout=0.5))
    fuse(model)
    x = torch.randn(4, 8, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(RuntimeError, match="preserve_rng_state=True"):
        y.sum().backward()
    model.eval()
    checkpoint(model, x, use_reentrant=False, preserve_rng_state=False).sum().backward()


def test_settings_that_change_within_a_recomputation_are_refused():
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model = get_peft_model(base, LoraConfig(target_modules=["0"]))
    model.add_adapter("other", LoraConfig(target_modules=["0"]))
    fuse(model)
    layer = next(module for module in model.modules() if isinstance(module, Linear))

    def run(x):
        layer.set_adapter(["other"])
        y = layer(x)
        layer.set_adapter(["default"])
        return y + layer(x)

    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="outside of the function"):
        checkpoint(run, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_within_checkpoints(use_reentrant):
    fused = fuse(make(second=SECOND))
    fused.enable_input_require_grads()
    expected = backward(fused, **BATCH, adapter_names=NAMES)
    _checkpoint_layers(fused, use_reentrant=use_reentrant)
    inner = fused.base_model.model.model.layers[0].mlp
    forward = inner.forward
    inner.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    if use_reentrant:
        loss = fused(**BATCH, adapter_names=NAMES).loss
        with pytest.raises(RuntimeError, match="one level of gradient checkpointing"):
            loss.backward()
    else:
        assert_same(backward(fused, **BATCH, adapter_names=NAMES), expected)


def test_changes_are_forgotten_only_with_an_error():
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model = get_peft_model(base, LoraConfig(target_modules=["0"]))
    model.add_adapter("other", LoraConfig(target_modules=["0"]))
    fuse(model)
    x = torch.randn(4, 8, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=False)
    for _ in range(200):
        model.set_adapter("other")
        model.set_adapter("default")
    with pytest.raises(RuntimeError, match="call backward\\(\\) earlier"):
        y.sum().backward()


@pytest.fixture
def small():
    """A fused model of one block that is recomputed, with two adapters, by kind of checkpoint."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
            self.use_reentrant = None

        def forward(self, x):
            if self.use_reentrant is None:
                return self.layers(x)
            return checkpoint(self.layers, x, use_reentrant=self.use_reentrant)

    torch.manual_seed(0)
    config = {"target_modules": ["0", "1"], "init_lora_weights": False}
    model = get_peft_model(Block(), LoraConfig(**config))
    model.add_adapter("other", LoraConfig(**config))
    return fuse(model)


def _run_in_thread(function, *arguments):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def _take_step(model, use_reentrant, names=None):
    """The gradients of a step with a number of nodes that its thread has not made before."""
    model.base_model.model.use_reentrant = use_reentrant
    x = torch.ones(3, 8, requires_grad=True)
    arguments = {} if names is None else {"adapter_names": names}
    model(x, **arguments).square().sum().backward()
    return gradients(model)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_passes_in_another_thread_have_its_settings(small, use_reentrant):
    small.eval()
    with torch.no_grad():
        for _ in range(3):  # passes that are not recomputed
            small(torch.ones(3, 8), adapter_names=["default", "other", "__base__"])
    small.set_adapter("other")
    small.train()
    found = _run_in_thread(_take_step, small, use_reentrant)
    assert_same(found, _take_step(twin(small), None))
    assert all(".other." in name for name in found)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_threads_that_trained_other_adapters_are_refused(small, use_reentrant):
    small.base_model.set_adapter(["default", "other"])
    names = ["default", "other", "__base__"]
    for _ in range(3):
        _take_step(small, use_reentrant, names)
    with pytest.raises(RuntimeError, match="several threads have called a layer"):
        _run_in_thread(_take_step, small, use_reentrant, names[::-1])
    small.zero_grad(set_to_none=True)
    fuse(unfuse(small))
    found = _run_in_thread(_take_step, small, use_reentrant, names[::-1])
    assert_same(found, _take_step(small, None, names[::-1]))


def test_a_change_by_another_thread_holds_from_the_next_pass_on(small):
    with ThreadPoolExecutor(1) as pool:
        for name in ("default", "other", "default"):
            small.set_adapter(name)
            found = pool.submit(_take_step, small, True).result()
            assert all(f".{name}." in each for each in found)
            assert len(found) == 4


def test_many_threads_are_told_apart_by_their_settings(small):
    for _ in range(20):  # threads whose settings are all the same
        _run_in_thread(_take_step, small, False)
    found = _run_in_thread(_take_step, small, False)
    assert_same(found, _take_step(small, None))
    small.set_adapter("other")
    with pytest.raises(RuntimeError, match="several threads have called a layer"):
        _run_in_thread(_take_step, small, False)


def test_passes_of_two_threads_at_once_have_their_own_names(small):
    small.eval()
    x, lists = torch.ones(3, 8), (["default", "other", "__base__"], ["other", "default", "other"])
    expected = [small(x, adapter_names=names) for names in lists]
    inside, done = threading.Event(), threading.Event()

    def wait(*_):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert done.wait(10)

    handle = small.base_model.model.layers[0].register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(small, x, adapter_names=lists[0])
        assert inside.wait(10)
        assert torch.equal(small(x, adapter_names=lists[1]), expected[1])
        done.set()
        assert torch.equal(other.result(), expected[0])
    handle.remove()
