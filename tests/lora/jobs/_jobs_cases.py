"""A tiny Llama, four jobs of different kinds on it, and comparisons of their bits."""

import copy

import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 80
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_llama(**changes):
    torch.manual_seed(0)
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**config, **changes}))


def make_data(seed, num_samples, shortest, longest):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (num_samples,), generator=generator)
    return [torch.randint(VOCABULARY, (int(n),), generator=generator) for n in lengths]


def with_labels(sample):
    labels = sample.clone()
    labels[: len(labels) // 3] = -100
    return {"input_ids": sample, "labels": labels}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=5e-3)


JOBS = {
    "plain": {
        "data": make_data(1, 11, 4, 24),
        "config": LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
        "batch_size": 3,
        "accumulation": 2,
    },
    "wide": {
        "data": make_data(2, 20, 2, 20),
        "config": LoraConfig(r=6, target_modules=ALL_LINEAR, use_rslora=True),
        "batch_size": 3,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    },
    "long": {
        "data": [with_labels(each) for each in make_data(3, 7, 40, 100)],
        "config": LoraConfig(r=3, lora_dropout=0.3, target_modules=["up_proj", "lm_head"]),
        "batch_size": 2,
        "num_steps": 15,
    },
    "short": {
        "data": make_data(4, 30, 2, 9),
        "config": LoraConfig(r=16, lora_dropout=0.05, target_modules=["down_proj", "o_proj"]),
        "batch_size": 4,
        "clipping": 0.5,
        "schedule": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 50),
    },
}


EARLY = 13
"""Steps after which all that happens to a job has happened: two epochs or more, a pause, a save."""


def add_job(jobs, name, **changes):
    arguments = {
        "optimizer": adamw,
        "num_steps": 50,
        "seed": sorted(JOBS).index(name) if name in JOBS else 9,
        **JOBS.get(name, JOBS["plain"]),
        **changes,
    }
    data, config = arguments.pop("data"), arguments.pop("config")
    jobs.add(name, data, copy.deepcopy(config), **arguments)


def weights_of(jobs, name):
    """Copies of the adapter's matrices, by PEFT's names."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(
        jobs.peft_model, adapter_name=name, save_embedding_layers=False
    )
    return {key: each.detach().clone() for key, each in state.items()}


def results_of(jobs):
    """Losses and weights of every job."""
    return {job.name: (job.losses, weights_of(jobs, job.name)) for job in jobs.report().jobs}


def have_same_bits(first, second):
    (losses, weights), (other_losses, other_weights) = first, second
    assert len(losses) > 0
    assert losses == other_losses
    assert weights.keys() == other_weights.keys()
    for key, each in weights.items():
        assert torch.equal(each, other_weights[key]), key
    return True
