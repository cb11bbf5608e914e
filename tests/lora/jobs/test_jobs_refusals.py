"""Refusals: what cannot be trained exactly is named before anything is trained."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from _jobs_cases import VOCABULARY, adamw, add_job, have_same_bits, make_llama, results_of
from penstock.lora.jobs import Jobs

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def jobs(base):
    """Jobs with one in it, which no refusal changes."""
    with Jobs(base, max_tokens=64) as jobs:
        add_job(jobs, "plain")
        yield jobs
        assert [job.name for job in jobs.report().jobs] == ["plain"]
        assert list(jobs.peft_model.peft_config) == ["plain"]


GOOD = torch.arange(5)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "job 'bad': data is empty"),
        (iter(()), "job 'bad': data is empty"),
        (7, "job 'bad': data is a int"),
        ("text", "job 'bad': data is a str"),
        ({"input_ids": [1, 2]}, "job 'bad': data is a dict"),
        ([GOOD, torch.arange(65)], r"job 'bad': data\[1\] has 65 tokens; the most .* is 64"),
        ([GOOD, torch.zeros(0, dtype=torch.int64)], r"data\[1\] has no token"),
        ([torch.rand(5)], "float32"),
        ([torch.ones(2, 3, dtype=torch.int64)], r"shape \(2, 3\)"),
        (["text"], r"data\[0\] is no list of integers"),
        ([{"labels": GOOD}], r"data\[0\] has no input_ids"),
        ([{"input_ids": GOOD, "labels": GOOD[:3]}], "has 5 tokens and 3 labels"),
        ([{"input_ids": GOOD, "pixel_values": GOOD}], r"has the keys \['pixel_values'\]"),
        ([{"input_ids": GOOD, "attention_mask": [1, 1, 1, 1, 0]}], "has padding"),
        ([torch.tensor([1, VOCABULARY])], f"input_ids has the number {VOCABULARY}"),
        ([torch.tensor([1, -1])], "input_ids has the number -1"),
        ([{"input_ids": GOOD, "labels": GOOD - 3}], "labels has the number -3"),
        ([GOOD, torch.tensor([1])], r"job 'bad': data\[1\] has no target .*: leave it out"),
        ([GOOD, {"input_ids": GOOD, "labels": [3, *[-100] * 4]}], r"data\[1\] has no target"),
    ],
)
def test_bad_data_is_named_with_its_job(jobs, data, message):
    with pytest.raises(ValueError, match=message):
        add_job(jobs, "bad", data=data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"clipping": 0.0}, "clipping is 0.0"),
        ({"optimizer": lambda p: None}, "optimizer gave a NoneType"),
        ({"optimizer": lambda p: torch.optim.LBFGS(p)}, "optimizer gave a LBFGS"),
        ({"optimizer": lambda p: adamw(p[:1])}, "optimizer holds other parameters"),
        ({"schedule": lambda o: 3}, "schedule gave a int"),
        (
            {"schedule": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)},
            "schedule gave a ReduceLROnPlateau",
        ),
        ({"optimizer": lambda p: 1 / 0}, "optimizer raised ZeroDivisionError.*called with one arg"),
        ({"schedule": lambda o: 1 / 0}, "schedule raised ZeroDivisionError.*called with one arg"),
        (
            {"config": LoraConfig(target_modules=["q_proj", "q_poj"])},
            r"target_modules has \['q_poj'\].*its linear layers are \['down_proj', .*'v_proj'\]",
        ),
        (
            {"config": LoraConfig(target_modules=r".*\.nothing")},
            "PEFT refused the config: .*change target_modules; its linear layers are",
        ),
    ],
)
def test_bad_arguments_are_named_with_their_job(jobs, arguments, message):
    with pytest.raises(ValueError, match=f"job 'bad': {message}"):
        add_job(jobs, "bad", **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adamw"}, "optimizer is a str; accepted is a function that makes it"),
        ({"schedule": 3}, "schedule is a int; accepted is a function that makes it"),
        ({"loss": "mean"}, "loss is a str; accepted is a function of logits and targets"),
        ({"accumulation": 1.5}, "accumulation is 1.5"),
        ({"clipping": "1"}, "clipping is '1'; accepted are numbers"),
        ({"clipping": torch.tensor(1.0)}, "clipping is tensor\\(1.\\); accepted are numbers"),
        ({"num_steps": True}, "num_steps is True"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"seed": True}, "seed is True"),
    ],
)
def test_arguments_of_other_types_are_refused(jobs, arguments, message):
    with pytest.raises(TypeError, match=f"job 'bad': {message}"):
        add_job(jobs, "bad", **arguments)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(), "the same sample twice, not double"),
        (lambda x, y: nn.functional.cross_entropy(x, y, reduction="sum") / len(y), "not double"),
        (lambda x, y: nn.functional.cross_entropy(x, y) * torch.nan, "is nan"),
        (nn.CrossEntropyLoss(reduction="none"), r"loss failed .* its shape is \(17,\)"),
        (lambda x, y: x.detach().sum(), "without a gradient"),
        (lambda x, y: 3.0, "the loss is a float"),
        (lambda x: x.sum(), "loss failed .* TypeError"),
    ],
    ids=["mean", "divided", "nan", "none", "constant", "float", "raises"],
)
def test_losses_that_are_no_sum_are_refused(jobs, loss, message):
    with pytest.raises(ValueError, match=f"(?s)job 'bad': .*{message}.*reduction=.sum"):
        add_job(jobs, "bad", data=[torch.arange(40)], loss=loss)


def test_a_loss_that_is_a_sum_is_taken(jobs):
    for loss in (
        nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1),
        lambda x, y: nn.functional.cross_entropy(x.half(), y, reduction="sum")[None],
    ):
        add_job(jobs, "good", loss=loss)
        jobs.remove("good")


@pytest.mark.parametrize(
    ("number", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_bad_numbers_of_steps_are_named(jobs, number, error):
    with pytest.raises(error, match=f"^num_steps is {number}"):
        jobs.step(number)
    with pytest.raises(error, match=f"^num_steps is {number}"):
        jobs.run(num_steps=number)
    with pytest.raises(error, match=f"^lookahead is {number}"):
        jobs.run(lookahead=number, num_steps=1)
    assert jobs.report().jobs[0].num_steps == 0


def test_a_base_is_that_of_one_jobs_until_it_is_closed(llama):
    first = Jobs(llama, max_tokens=64)
    with pytest.raises(ValueError, match=r"already that of another Jobs.* close it first"):
        Jobs(llama, max_tokens=64)
    add_job(first, "plain")
    with pytest.raises(ValueError, match="already that of another Jobs"):
        Jobs(llama, max_tokens=64)
    first.close()
    second = Jobs(llama, max_tokens=64)
    with pytest.raises(ValueError, match="already that of another Jobs"):
        add_job(first, "plain")
    first.close()  # not the second's
    with pytest.raises(ValueError, match="already that of another Jobs"):
        add_job(first, "plain")
    del second
    add_job(first, "plain", num_steps=1)
    assert first.run().jobs[0].state == "finished"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_bits_are_known_in_float32_and_float64_alone(dtype):
    with Jobs(make_llama().to(dtype), max_tokens=64) as jobs:
        add_job(jobs, "plain", num_steps=1)
        report = jobs.run()
    assert report.jobs[0].state == "finished"
    assert report.is_exact == (dtype == torch.float64)
    if not report.is_exact:
        assert f"is {dtype} on cpu; rows keep their bits" in str(report.inexact_reason)


def test_autocast_is_reported(llama):
    with Jobs(llama, max_tokens=64) as jobs:
        add_job(jobs, "plain", num_steps=2)
        jobs.step()
        assert jobs.report().is_exact
        with torch.autocast("cpu", dtype=torch.bfloat16):
            jobs.step()
        assert jobs.report().jobs[0].state == "finished"
        assert str(jobs.report().inexact_reason).startswith("passes run under torch.autocast")


@pytest.mark.parametrize("name", ["", "a.b", "../x", "q_proj", "keys", "my_lora_", "0", 3])
def test_names_that_are_no_adapters_or_folders_are_refused(jobs, name):
    with pytest.raises(ValueError, match="name is"):
        add_job(jobs, name)


def test_a_name_is_given_once(jobs):
    with pytest.raises(ValueError, match="job 'plain' exists"):
        add_job(jobs, "plain")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, r"use_dora=True\) is not possible here: train DoRA with stock PEFT"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save.*the base is frozen and shared"),
        ({"bias": "all"}, "bias='all'.*the base is frozen and shared"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"target_parameters": ["q_proj.weight"]}, "target_parameters"),
        ({"layer_replication": [(0, 1)]}, "layer_replication"),
        ({"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"}, "alora_invocation_tokens"),
        ({"r": 0}, "ranks"),
        ({"lora_alpha": float("nan")}, "job 'bad': LoraConfig has the alphas"),
        ({"init_lora_weights": 1}, "init_lora_weights=1"),
        ({"lora_dropout": 1.0}, r"lora_dropout=1.0"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens is a Embedding"),
    ],
)
def test_adapters_that_are_no_plain_lora_are_refused(jobs, config, message):
    with pytest.raises(ValueError, match=message):
        add_job(jobs, "bad", config=LoraConfig(**{"target_modules": ["q_proj"], **config}))


@pytest.mark.parametrize("neighbours", [[], ["plain"]], ids=["first", "second"])
def test_an_adapter_that_peft_refuses_halfway_leaves_nothing(llama, neighbours):
    kinds = [type(module) for module in llama.modules()]
    with Jobs(llama, max_tokens=64) as jobs:
        for name in neighbours:
            add_job(jobs, name, num_steps=1)
        names = [name for name, _ in llama.named_modules()]
        for _ in range(2):
            with pytest.raises(ValueError, match=r"LlamaRMSNorm.* is not supported"):
                add_job(jobs, "bad", config=LoraConfig(target_modules=["o_proj", "norm"]))
            assert [name for name, _ in llama.named_modules()] == names
        add_job(jobs, "bad", num_steps=1)
        assert all(job.state == "finished" for job in jobs.run().jobs)
    assert [type(module) for module in llama.modules()] == kinds
    assert not hasattr(llama, "peft_config")


def test_another_kind_of_config_is_refused(jobs):
    from peft import IA3Config

    with pytest.raises(TypeError, match="config is a IA3Config; accepted is LoraConfig"):
        add_job(jobs, "bad", config=IA3Config())


def test_parts_of_a_layer_that_a_pass_would_not_run_are_refused(llama):
    with Jobs(llama, max_tokens=64) as jobs:
        add_job(jobs, "plain", num_steps=5)
        jobs.step()
        layer = llama.model.layers[0].self_attn.q_proj
        handle = layer.lora_A["plain"].register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match=r"q_proj.lora_A.plain has hooks"):
            jobs.step()
        handle.remove()
        layer.lora_dropout["plain"] = nn.AlphaDropout(0.1)
        with pytest.raises(ValueError, match="is a AlphaDropout; Jobs computes PEFT's own"):
            jobs.step()
        layer.lora_dropout["plain"] = nn.Dropout(0.1)
        calls = []
        layer.register_forward_hook(lambda *_: calls.append(1))
        jobs.step()
        assert calls


def shift_tokens(model):
    """Mix each row with the one before, as a convolution over tokens does."""
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x + x.roll(1, 1))
    return model


def learn_positions(model):
    """Add embeddings of the row's number, whatever position_ids says."""
    mlp = model.model.layers[0].mlp
    forward, table = mlp.forward, torch.randn(128, 32)
    mlp.forward = lambda x: forward(x + table[: x.shape[1]])
    return model


def drop_in_place(model):
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: nn.functional.dropout(forward(x), 0.1, mlp.training)
    return model


@pytest.mark.parametrize("change", [shift_tokens, learn_positions, drop_in_place])
def test_models_in_which_samples_see_each_other_are_found_by_comparison(llama, change):
    jobs = Jobs(change(llama), max_tokens=64)
    with pytest.raises(ValueError, match="gives samples back to back other logits than each"):
        add_job(jobs, "plain")
    assert jobs.report().jobs == ()
    assert not hasattr(llama, "peft_config")


def test_rounding_by_the_place_of_a_sample_is_reported(llama):
    """Rotary positions are relative: other ones give the same numbers, but not the same bits."""
    rotary = llama.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])
    with Jobs(llama, max_tokens=64) as jobs:
        add_job(jobs, "plain")
        report = jobs.report()
    assert not report.is_exact
    assert report.inexact_reason == "a trial gave a chunk beside another one other bits than alone"


def choose_by_attention(model):
    """Look its attention up in a table of its own, as Doge does."""
    mlp = model.model.layers[0].mlp
    table = {"sdpa": mlp.forward}
    mlp.forward = lambda x: table[model.config._attn_implementation](x)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GPT2LMHeadModel(
                GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2)
            ),
            "GPT2LMHeadModel has dropout of its own .transformer.drop",
        ),
        (
            lambda: BloomForCausalLM(
                BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2)
            ),
            "BloomForCausalLM cannot be run .* does not go through Transformers' interface",
        ),
        (
            lambda: BertLMHeadModel(
                BertConfig(
                    **{key: each for key, each in TINY.items() if "key_value" not in key},
                    hidden_dropout_prob=0,
                    attention_probs_dropout_prob=0,
                )
            ),
            "attention of BertSelfAttention is not causal",
        ),
        (
            lambda: make_llama(attention_dropout=0.1),
            "attention of LlamaAttention has dropout 0.1: set it to 0",
        ),
        (
            lambda: make_llama(
                max_position_embeddings=32,
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            ),
            None,
        ),
        (
            lambda: choose_by_attention(make_llama()),
            "LlamaForCausalLM cannot be run .* back to back: 'penstock_jobs",
        ),
    ],
    ids=["gpt2", "bloom", "bert", "attention", "dynamic", "table"],
)
def test_models_that_do_not_fit_are_refused_by_name(make, message):
    torch.manual_seed(0)

    def run():
        with Jobs(make(), max_tokens=64) as jobs:
            add_job(jobs, "plain", data=[GOOD], config=LoraConfig(r=2), num_steps=1)
            jobs.run()

    if message is None:  # no sample is longer than the positions that the model knows
        run()
        return
    with pytest.raises(ValueError, match=message):
        run()


def test_a_base_is_a_model_of_transformers_without_adapters(llama):
    with pytest.raises(TypeError, match="base_model is a Linear"):
        Jobs(nn.Linear(2, 2), max_tokens=8)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        Jobs(llama, max_tokens=0)
    with pytest.raises(ValueError, match="chunk_tokens is 65; accepted are 1 to 64"):
        Jobs(llama, max_tokens=64, chunk_tokens=65)
    model = get_peft_model(llama, LoraConfig(r=2))
    for each in (model, llama):
        with pytest.raises(TypeError, match="already a PEFT model"):
            Jobs(each, max_tokens=8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=128,
                attn_pdrop=0, resid_pdrop=0, embd_pdrop=0, bos_token_id=0, eos_token_id=0,
            )
        ),
        lambda: MistralForCausalLM(MistralConfig(**TINY, sliding_window=20)),
        lambda: make_llama(
            hidden_size=36, intermediate_size=52, num_attention_heads=6, attention_bias=True
        ),
    ],
    ids=["gpt2", "window", "odd"],
)  # fmt: skip
def test_other_models_have_the_same_bits_beside_neighbours(make):
    """GPT-2 (learned positions, transposed weights), a window, widths that are no vector's."""
    torch.manual_seed(0)
    model = make()
    is_gpt2 = isinstance(model, GPT2LMHeadModel)
    if is_gpt2:
        targets = {name: ["c_attn", "c_fc"] for name in ("short", "long")}
    else:
        targets = {"short": ["q_proj"], "long": ["v_proj", "down_proj"]}
    configs = {
        name: LoraConfig(r=3, lora_dropout=0.2, target_modules=each, fan_in_fan_out=is_gpt2)
        for name, each in targets.items()
    }
    found = []
    for names in (["short"], ["long", "short"]):
        with Jobs(model, max_tokens=128) as jobs:
            for name in names:
                add_job(jobs, name, num_steps=4, config=copy.deepcopy(configs[name]))
            report = jobs.run()
            found.append(results_of(jobs)["short"])
        assert report.is_exact, report.inexact_reason
    assert have_same_bits(*found)


def test_experts_are_trained_but_not_said_to_be_exact():
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2))
    with Jobs(model, max_tokens=128) as jobs:
        add_job(jobs, "plain", num_steps=1)
        report = jobs.run()
    assert not report.is_exact
    assert "were not probed" in str(report.inexact_reason)
