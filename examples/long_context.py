"""Train a small Llama to recall facts, then ask it about contexts 16 times the budget.

    python examples/long_context.py
    python examples/long_context.py --length 8192 --facts 256

A fact is a key followed by its value, and lies somewhere among other tokens. A question is a key;
the answer is one token, its value. The model, from a config and a seed, learns this from short
contexts first. Then `penstock.kv.cache` holds long ones: a sixteenth of the keys and values on the
device tier, the rest below it. Each selector reads a share of their blocks to answer. Tables and a
picture show how many answers are right, and the bytes that were read for each.
"""

import argparse
import math
import statistics
import time
from dataclasses import dataclass, replace

import torch
from _shared import panels, progress_bar, save, titled
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from penstock.kv import Accumulated, DoubleSparsity, Nosa, Window
from penstock.units import format_bytes

NUM_OTHERS, NUM_KEYS, NUM_VALUES = 64, 512, 64
FIRST_KEY, FIRST_VALUE = NUM_OTHERS, NUM_OTHERS + NUM_KEYS
BUDGET_SHARE = 1 / 16
SHARES = [1 / 16, 1 / 8, 1 / 4]  # of 1/32 only the sink and the newest block would be left
COLORS = {
    "all": "#555555",
    "double_sparsity": "#004488",
    "nosa": "#bb5566",
    "accumulated": "#228833",
    "window": "#ddaa33",
}


@dataclass(frozen=True)
class Stage:
    """Contexts of a part of the training, which ends early where answers are right."""

    length: int
    num_facts: int
    batch_size: int
    num_steps: int
    accuracy: float


STAGES = [
    Stage(length=4, num_facts=2, batch_size=128, num_steps=1500, accuracy=0.97),
    Stage(length=8, num_facts=3, batch_size=96, num_steps=600, accuracy=0.95),
    Stage(length=16, num_facts=4, batch_size=64, num_steps=600, accuracy=0.95),
    Stage(length=32, num_facts=8, batch_size=32, num_steps=600, accuracy=0.95),
    Stage(length=64, num_facts=16, batch_size=24, num_steps=600, accuracy=0.97),
    Stage(length=256, num_facts=48, batch_size=12, num_steps=400, accuracy=0.97),
    Stage(length=1024, num_facts=128, batch_size=3, num_steps=300, accuracy=0.98),
]


@dataclass(frozen=True)
class Contexts:
    """Contexts with their questions.

    Attributes:
        tokens: `(B, length)`.
        keys: The questions, `(B, Q)`.
        values: Their answers, `(B, Q)`.
    """

    tokens: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Answers:
    """Counts of the answers with one selector."""

    selector: str
    share: float
    num_right: int
    num_asked: int
    step_seconds: tuple[float, ...]
    read_bytes: int
    fetched_bytes: int
    selector_bytes: int

    @property
    def accuracy(self):
        return self.num_right / self.num_asked

    @property
    def tokens_per_second(self):
        return 1 / statistics.median(self.step_seconds)


def make_model(hidden, layers, length, seed):
    """Return a Llama; the same in every call."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=FIRST_VALUE + NUM_VALUES,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2 * length,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            initializer_range=0.06,
        )
    )
    # Embeddings as large as what layers add to them, or these drown them.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
    return model


def draw_contexts(num_contexts, length, num_facts, num_questions, generator):
    """Draw facts at random places among other tokens, and questions about them."""
    tokens = torch.randint(1, NUM_OTHERS, (num_contexts, length), generator=generator)

    def choose(total, count):
        return torch.rand(num_contexts, total, generator=generator).argsort(dim=1)[:, :count]

    keys = FIRST_KEY + choose(NUM_KEYS, num_facts)
    values = torch.randint(NUM_VALUES, keys.shape, generator=generator) + FIRST_VALUE
    places = 2 * choose(length // 2, num_facts)
    tokens.scatter_(1, places, keys).scatter_(1, places + 1, values)
    asked = choose(num_facts, num_questions)
    return Contexts(tokens, keys.gather(1, asked), values.gather(1, asked))


def answer_at_once(model, contexts):
    """Logits of the answers to all questions, which follow the context with their answers."""
    questions = torch.stack([contexts.keys, contexts.values], dim=2).flatten(1)
    ids = torch.cat([contexts.tokens, questions], dim=1)
    states = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return model.lm_head(states[:, contexts.tokens.shape[1] :: 2])


def train(model, stages, generator, learning_rate=2e-3):
    """Train on longer and longer contexts; return the share of right answers of each stage."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    found = []
    with progress_bar() as progress:
        for stage in stages:
            name = f"{stage.length:5} tokens, {stage.num_facts:3} facts"
            bar = progress.add_task(name, total=stage.num_steps)
            mean = 0.0
            for step in range(stage.num_steps):
                for group in optimizer.param_groups:  # a long stage ends with small steps
                    group["lr"] = learning_rate * max(0.1, 1 - step / stage.num_steps)
                shape = (stage.batch_size, stage.length, stage.num_facts, stage.num_facts)
                contexts = draw_contexts(*shape, generator)
                logits = answer_at_once(model, contexts)
                loss = cross_entropy(logits.flatten(0, 1), contexts.values.flatten())
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                right = (logits.argmax(dim=-1) == contexts.values).float().mean().item()
                mean += 0.1 * (right - mean)
                progress.update(bar, advance=1, description=f"{name}, {mean:4.0%} right")
                if mean > stage.accuracy:
                    progress.update(bar, total=step + 1)
                    break
            found.append(mean)
    return found


def make_selectors(channels):
    """Return what makes each selector for a share of the blocks."""
    return {
        "double_sparsity": lambda share: DoubleSparsity(channels, share=share, bits=4),
        "nosa": lambda share: Nosa(share=share),
        "accumulated": lambda share: Accumulated(share=share),
        "window": lambda share: Window(share=share),
    }


def cache_bytes(model, length):
    """Bytes of the keys and values of a context."""
    config = model.config
    return 2 * length * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


@torch.inference_mode()
def ask(model, context, selector, name, share, block_tokens):
    """Read a context into a cache, and ask its questions one after the other."""
    budget = int(BUDGET_SHARE * cache_bytes(model, context.tokens.shape[1]))
    with penstock.kv.cache(
        model, device_memory=budget, selector=selector, block_tokens=block_tokens
    ) as cache:
        model(input_ids=context.tokens, past_key_values=cache, logits_to_keep=1)
        before, seconds, num_right = cache.report(), [], 0
        for key, value in zip(context.keys[0], context.values[0], strict=True):
            begin = time.perf_counter()
            logits = model(input_ids=key.view(1, 1), past_key_values=cache).logits
            seconds.append(time.perf_counter() - begin)
            num_right += int(logits[0, -1].argmax() == value)
            cache.crop(-1)  # the next question follows the context, not this one
        after = cache.report()
        num_read = after.num_hits + after.num_misses - before.num_hits - before.num_misses
        return Answers(
            selector=name,
            share=share,
            num_right=num_right,
            num_asked=context.keys.shape[1],
            step_seconds=tuple(seconds),
            read_bytes=num_read * cache.pool.layout(0).record_bytes,
            fetched_bytes=after.read_bytes - before.read_bytes,
            selector_bytes=getattr(selector, "nbytes", 0),
        )


def add(answers, more):
    """Add the counts of another context."""
    if answers is None:
        return more
    names = ("num_right", "num_asked", "step_seconds", "read_bytes", "fetched_bytes")
    sums = {name: getattr(answers, name) + getattr(more, name) for name in names}
    return replace(answers, **sums)


def compare(model, contexts, selectors, shares, block_tokens):
    """Ask all questions with every selector and share."""
    cases = [("all", 1.0)] + [(name, share) for name in selectors for share in shares]
    found = []
    with progress_bar() as progress:
        bar = progress.add_task("questions", total=len(cases) * len(contexts))
        for name, share in cases:
            progress.update(bar, description=f"{name}, {say_share(share)} of the blocks")
            answers = None
            for context in contexts:
                selector = "all" if name == "all" else selectors[name](share)
                more = ask(model, context, selector, name, share, block_tokens)
                answers = add(answers, more)
                progress.advance(bar)
            found.append(answers)
    return found


def say_share(share):
    return "all" if share == 1 else f"1/{round(1 / share)}"


def margin(answers):
    """Half of the 95 % interval of the accuracy (Wilson's, which is not 0 at 0 or 1)."""
    n, p, z = answers.num_asked, answers.accuracy, 1.96
    return z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))


def result_table(found, length):
    table = Table(title=f"answers from {length} tokens", title_justify="left")
    sizes = ("KiB a\ntoken\nread", "KiB a\ntoken\nfetched", "KiB\nkept")
    for name in ("selector", "blocks", "right, %", "tokens/s", *sizes):
        table.add_column(name, justify="left" if name == "selector" else "right")
    for each in found:
        table.add_row(
            each.selector,
            say_share(each.share),
            f"{100 * each.accuracy:.1f} ± {100 * margin(each):.1f}",
            f"{each.tokens_per_second:,.0f}",
            f"{each.read_bytes / each.num_asked / 2**10:,.0f}",
            f"{each.fetched_bytes / each.num_asked / 2**10:,.0f}",
            f"{each.selector_bytes / 2**10:,.0f}",
        )
    return table


def draw(found, path):
    """Accuracy against bytes read, and tokens per second at each share."""
    figure, axes = panels(2, width=11, height=4)
    for name, color in COLORS.items():
        some = [each for each in found if each.selector == name]
        reads = [each.read_bytes / each.num_asked / 2**10 for each in some]
        dashes = "--" if name == "window" else "-"  # it often lies on another one
        style = {"color": color, "ls": dashes, "marker": "o", "ms": 5, "lw": 1.6, "label": name}
        bars = [100 * margin(each) for each in some]
        right = [100 * each.accuracy for each in some]
        axes[0].errorbar(reads, right, yerr=bars, capsize=2, **style)
        axes[1].plot(reads, [each.tokens_per_second for each in some], **style)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set_xlabel("KiB of keys and values read for a token")
    axes[0].set_ylim(-3, 103)
    axes[0].legend(frameon=False)
    titled(axes[0], "answers that are right, %, with 95 % intervals")
    axes[1].set_ylim(bottom=0)
    titled(axes[1], "tokens per second")
    save(figure, path)


def read_options(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=4096, help="tokens of a context")
    parser.add_argument("--facts", type=int, default=256, help="in a context; at most 512")
    parser.add_argument("--contexts", type=int, default=2)
    parser.add_argument("--questions", type=int, default=128, help="about each context")
    parser.add_argument("--steps", type=int, default=1500, help="of a stage of training, at most")
    parser.add_argument("--long-steps", type=int, default=80, help="of the last, at full length")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more, for a larger model")
    parser.add_argument("--figure", default="long_context.png")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = read_options(arguments)
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(options.seed)
    model = make_model(options.hidden, options.layers, options.length, options.seed)
    stages = [
        replace(stage, num_steps=min(stage.num_steps, options.steps))
        for stage in STAGES
        if stage.length < options.length
    ]
    stages.append(Stage(options.length, options.facts, 1, options.long_steps, 0.995))
    train(model, stages, generator)
    model.eval()

    shape = (1, options.length, options.facts, options.questions)
    text = draw_contexts(*shape, generator)
    channels = penstock.kv.calibrate(
        model, [torch.cat([text.tokens, text.keys], dim=1)], num_channels=24
    )
    contexts = [draw_contexts(*shape, generator) for _ in range(options.contexts)]
    found = compare(model, contexts, make_selectors(channels), SHARES, options.block_tokens)
    Console().print(result_table(found, options.length))
    total = cache_bytes(model, options.length)
    print(
        f"keys and values of a context are {format_bytes(total)}, "
        f"the budget is {format_bytes(int(BUDGET_SHARE * total))}"
    )
    draw(found, options.figure)
    return found


if __name__ == "__main__":
    main()
