"""Recall facts from contexts 16 times the memory for keys and values, with each selector.

    python examples/long_context.py
    python examples/long_context.py --context 16384 --store /tmp

A small Llama learns associative recall in about a minute: facts, each a token of a key and a value,
lie scattered in noise, and a key asks for its value. Then it answers from contexts whose keys and
values are 16 times the device memory: `all` reads everything and is exact, selectors read a
sixteenth of the blocks. Accuracy against bytes read is shown and saved as a picture.
"""

import argparse
import time
from dataclasses import dataclass

import torch
from _shared import panels, progress_bar, save, titled
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import penstock.kv
from penstock.units import format_bytes

NUM_KEYS = 32  # and as many values
FIRST_QUESTION = NUM_KEYS * NUM_KEYS  # the tokens before are facts: key * NUM_KEYS + value
FIRST_ANSWER = FIRST_QUESTION + NUM_KEYS
FIRST_NOISE = FIRST_ANSWER + NUM_KEYS
VOCABULARY = FIRST_NOISE + 64
HEAD_DIM, KV_HEADS, LAYERS = 32, 2, 2
SHARES = (1 / 16, 1 / 8, 1 / 4)
# Context, batch, facts, most steps, accuracy at which the next stage begins.
STAGES = [
    (16, 64, 8, 800, 0.9),
    (64, 32, 16, 300, 0.95),
    (256, 8, 32, 300, 0.97),
    (2048, 2, 32, 200, 0.985),
    (4096, 1, 32, 60, 0.99),
]


@dataclass(frozen=True)
class Answers:
    """Accuracy and costs of one selector."""

    name: str
    share: float
    accuracy: float
    read_bytes: float
    seconds: float


def draw(generator, batch, context, num_facts):
    """Contexts of facts in noise; the questions and answers on all facts, in another order."""
    tokens = torch.randint(FIRST_NOISE, VOCABULARY, (batch, context), generator=generator)
    keys = torch.rand(batch, NUM_KEYS, generator=generator).argsort(1)[:, :num_facts]
    values = torch.randint(0, NUM_KEYS, (batch, num_facts), generator=generator)
    places = torch.rand(batch, context, generator=generator).argsort(1)[:, :num_facts]
    tokens.scatter_(1, places, keys * NUM_KEYS + values)
    order = torch.rand(batch, num_facts, generator=generator).argsort(1)
    return tokens, FIRST_QUESTION + keys.gather(1, order), FIRST_ANSWER + values.gather(1, order)


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1 << 17,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


def train(model, stages, progress):
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.98), weight_decay=0)
    step = 0
    for context, batch, num_facts, num_steps, enough in stages:
        task = progress.add_task(f"training, contexts of {context}", total=num_steps)
        mean = 0.0
        for _ in range(num_steps):
            tokens, questions, answers = draw(generator, batch, context, num_facts)
            turns = torch.stack([questions, answers], dim=2).flatten(1)
            hidden = model.model(torch.cat([tokens, turns], dim=1)).last_hidden_state
            logits = model.lm_head(hidden[:, context::2])
            loss = cross_entropy(logits.flatten(0, 1), answers.flatten())
            loss.backward()
            step += 1
            optimizer.param_groups[0]["lr"] = 3e-3 * min(1, step / 50)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            accuracy = (logits.argmax(-1) == answers).float().mean().item()
            mean = 0.95 * mean + 0.05 * accuracy
            text = f"training, contexts of {context}: accuracy {mean:.2f}"
            progress.update(task, advance=1, description=text)
            if mean > enough:
                break
        progress.update(task, completed=num_steps)


def cache_bytes(batch, context):
    return 2 * LAYERS * batch * KV_HEADS * context * HEAD_DIM * 4


def make_selectors(model, share, block_tokens):
    """Selectors that read a share of the blocks, by name."""
    (text, *_) = draw(torch.Generator().manual_seed(2), 4, 1024, NUM_KEYS)
    channels = penstock.kv.calibrate(model, [text], num_channels=8)
    pooling = {"pool_tokens": block_tokens // 2, "stride": block_tokens // 4}
    return {
        "double_sparsity": penstock.kv.DoubleSparsity(channels, share=share, bits=4),
        "nosa": penstock.kv.Nosa(share=share, **pooling),
        "accumulated": penstock.kv.Accumulated(share=share),
        "window": penstock.kv.Window(share=share),
    }


@torch.no_grad()
def answer(model, name, selector, share, arguments, progress):
    """Prefill the contexts, then ask every fact of each, one token at a time."""
    generator = torch.Generator().manual_seed(3)
    tokens, questions, answers = draw(
        generator, arguments.batch, arguments.context, arguments.facts
    )
    memory = cache_bytes(arguments.batch, arguments.context) // 16
    num_right = 0
    task = progress.add_task(f"{name}, 1/{round(1 / share)} of the blocks", total=arguments.facts)
    with penstock.kv.cache(
        model,
        device_memory=memory,
        store=arguments.store,
        selector=selector,
        block_tokens=arguments.block_tokens,
    ) as cache:
        for part in tokens.split(1024, dim=1):
            model(input_ids=part, past_key_values=cache)
        before, start = cache.report(), time.perf_counter()
        for question, right in zip(questions.T, answers.T, strict=True):
            logits = model(input_ids=question[:, None], past_key_values=cache).logits
            num_right += int((logits[:, -1].argmax(-1) == right).sum())
            progress.advance(task)
        after, seconds = cache.report(), time.perf_counter() - start
    records = after.num_hits + after.num_misses - before.num_hits - before.num_misses
    record_bytes = 2 * arguments.block_tokens * HEAD_DIM * 4
    num_answers = answers.numel()
    return Answers(
        name, share, num_right / num_answers, records * record_bytes / num_answers, seconds
    )


def show(rows, arguments):
    table = Table(title=f"{arguments.context} tokens, a sixteenth of them in device memory")
    for column in ("selector", "blocks", "accuracy", "bytes per token", "tokens per second"):
        table.add_column(column, justify="left" if column == "selector" else "right")
    num_answers = arguments.batch * arguments.facts
    for row in rows:
        table.add_row(
            row.name,
            f"1/{round(1 / row.share)}",
            f"{row.accuracy:.1%}",
            format_bytes(round(row.read_bytes)),
            f"{num_answers / row.seconds:.0f}",
        )
    Console().print(table)


def draw_picture(rows, path):
    figure, (axis,) = panels(1, width=6, height=4)
    for name in dict.fromkeys(row.name for row in rows):
        of_name = sorted((r for r in rows if r.name == name), key=lambda row: row.read_bytes)
        x, y = [row.read_bytes for row in of_name], [100 * row.accuracy for row in of_name]
        axis.plot(x, y, marker="o", label=name)
    axis.set_xscale("log")
    axis.set_xlabel("bytes read per token")
    axis.set_ylim(-3, 103)
    titled(axis, "facts recalled (%)")
    axis.legend(frameon=False)
    save(figure, path)


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--facts", type=int, default=NUM_KEYS)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--store", help="folder of the file below; without it the rest is in RAM")
    parser.add_argument("--out", default="long_context.png")
    arguments = parser.parse_args(argv)
    model = make_model()
    rows = []
    with progress_bar() as progress:
        train(model, STAGES, progress)
        model.eval()
        rows.append(answer(model, "all", "all", 1.0, arguments, progress))
        for share in SHARES:
            for name, selector in make_selectors(model, share, arguments.block_tokens).items():
                rows.append(answer(model, name, selector, share, arguments, progress))
    show(rows, arguments)
    draw_picture(rows, arguments.out)


if __name__ == "__main__":
    main()
