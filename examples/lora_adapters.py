"""Train four adapters of different rank on one small Llama, each on text of its own.

    python examples/lora_adapters.py
    PENSTOCK_DATA=/data python examples/lora_adapters.py --steps 80 --out adapters

Each job has Python sources of the standard library on a topic of its own. With a folder that has
`batching/text/`, two jobs learn film reviews and lattices of numbers instead. Tokens are bytes, and
the base, from a config and a seed, learns some other sources first. `penstock.lora.Jobs` then
trains all adapters together, stock PEFT loads what was saved, and logits are compared. A picture is
saved.
"""

import argparse
import os
import re
import statistics
import sysconfig
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from _shared import panels, progress_bar, save, titled
from peft import LoraConfig, PeftModel
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.lora import Jobs
from penstock.tables import report_table
from penstock.units import format_seconds

SOURCES_OF_BASE = ["argparse.py", "ast.py", "dataclasses.py", "inspect.py", "typing.py"]
TOPICS = {
    "network": ["ftplib.py", "imaplib.py", "poplib.py", "smtplib.py", "ssl.py", "socketserver.py"],
    "numbers": ["_pydecimal.py", "fractions.py", "numbers.py", "random.py", "statistics.py"],
    "testing": ["doctest.py", "unittest/*.py"],
    "archives": ["gzip.py", "bz2.py", "lzma.py", "shutil.py", "tarfile.py", "zipfile/*.py"],
}
COLORS = ["#004488", "#bb5566", "#ddaa33", "#228833"]
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Plan:
    """What a job is trained with beside its text."""

    rank: int
    dropout: float
    batch_size: int
    learning_rate: float


PLANS = [
    Plan(rank=4, dropout=0.0, batch_size=8, learning_rate=6e-3),
    Plan(rank=8, dropout=0.05, batch_size=6, learning_rate=4e-3),
    Plan(rank=16, dropout=0.05, batch_size=4, learning_rate=3e-3),
    Plan(rank=32, dropout=0.1, batch_size=6, learning_rate=2e-3),
]


def read_texts(data, max_samples, length):
    """By topic samples of at most `length` bytes, as tokens."""
    texts = {topic: read_sources(patterns) for topic, patterns in TOPICS.items()}
    if data is not None:
        folder = Path(data, "batching", "text")
        trees = (folder / "sst_trees.txt").read_text().splitlines()
        del texts["testing"], texts["archives"]
        texts["reviews"] = [" ".join(re.findall(r"[^\s()]+(?=\))", t)).encode() for t in trees]
        texts["lattices"] = (folder / "lattices.txt").read_bytes().split(b"\n\n")
    return {topic: cut_text(parts, max_samples, length) for topic, parts in texts.items()}


def read_sources(patterns):
    """Paragraphs of some sources of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for each in patterns for path in sorted(library.glob(each))]
    return b"\n".join(path.read_bytes() for path in files).split(b"\n\n")


def cut_text(parts, max_samples, length):
    """Join paragraphs as long as they fit, and return tokens."""
    samples, piece = [], b""
    for part in parts:
        if piece and len(piece) + len(part) + 2 > length:
            samples.append(piece)
            piece = b""
        piece += part[: length - 2] + b"\n\n"
    return [torch.tensor(list(each)) for each in [*samples, piece][:max_samples]]


def make_base(hidden, layers, length):
    """Return a Llama with bytes as tokens; the same in every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=length,
        )
    )


def train_base(base, samples, num_steps):
    """Train the base as a stock model in a stock loop."""
    optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
    pad = torch.nn.utils.rnn.pad_sequence
    with progress_bar() as progress:
        bar = progress.add_task("the base", total=num_steps)
        for _ in range(num_steps):
            batch = [samples[i] for i in torch.randint(len(samples), (8,)).tolist()]
            tokens = pad(batch, batch_first=True)
            labels = pad(batch, batch_first=True, padding_value=-100)
            loss = base(input_ids=tokens, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.update(bar, advance=1, description=f"the base, loss {loss.item():.2f}")


@torch.no_grad()
def evaluate(model, samples):
    """Mean loss of all tokens, sample by sample."""
    model.eval()
    total = sum(
        cross_entropy(model(input_ids=s[None]).logits[0, :-1], s[1:], reduction="sum").item()
        for s in samples
    )
    return total / sum(len(sample) - 1 for sample in samples)


def live_table(report, plans, base_losses):
    """All jobs as they are now."""
    table = Table(title="four jobs on one base", title_justify="left")
    for name in ("job", "rank", "steps", "", "base", "loss", "rate", "tokens/s", "state"):
        is_text = name in ("job", "steps", "state")
        table.add_column(name, justify="left" if is_text else "right")
    for job in report.jobs:
        table.add_row(
            job.name,
            str(plans[job.name].rank),
            ProgressBar(total=job.num_planned_steps, completed=job.num_steps, width=16),
            f"{job.num_steps}/{job.num_planned_steps}",
            f"{base_losses[job.name]:.2f}",
            "" if not job.losses else f"{statistics.fmean(job.losses[-5:]):.2f}",
            "" if job.state == "finished" else f"{job.learning_rate:.1e}",
            "" if job.state == "finished" else f"{job.tokens_per_second:,.0f}",
            job.state,
        )
    return table


def add_jobs(jobs, texts, plans, num_steps):
    for number, (name, samples) in enumerate(texts.items()):
        plan = plans[name]
        jobs.add(
            name,
            samples,
            LoraConfig(
                r=plan.rank,
                lora_alpha=2 * plan.rank,
                lora_dropout=plan.dropout,
                target_modules=ALL_LINEAR,
            ),
            optimizer=lambda parameters, rate=plan.learning_rate: torch.optim.AdamW(
                parameters, lr=rate
            ),
            schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, num_steps
            ),
            batch_size=plan.batch_size,
            clipping=1.0,
            num_steps=num_steps,
            seed=number,
        )


def draw(report, plans, base_losses, held_out, path):
    """Losses over the training, and those of text that no job has seen."""
    figure, axes = panels(2, width=11, height=3.6)
    for color, job in zip(COLORS, report.jobs, strict=True):
        window = max(1, len(job.losses) // 12)
        means = [
            statistics.fmean(job.losses[max(0, k - window + 1) : k + 1])
            for k in range(len(job.losses))
        ]
        label = f"{job.name}, rank {plans[job.name].rank}"
        axes[0].plot(range(1, len(means) + 1), means, color=color, lw=1.6, label=label)
    axes[0].set(xlabel="step")
    titled(axes[0], "training loss of each job, nats a byte")
    axes[0].legend(frameon=False)
    names = [job.name for job in report.jobs]
    places = range(len(names))
    for shift, losses, color, label in (
        (-0.2, base_losses, "#bbbbbb", "the base"),
        (0.2, held_out, COLORS, "with its adapter"),
    ):
        bars = axes[1].bar(
            [place + shift for place in places],
            [losses[name] for name in names],
            width=0.38,
            color=color,
            label=label,
        )
        axes[1].bar_label(bars, fmt="%.2f", padding=2)
    axes[1].margins(y=0.12)
    axes[1].set_xticks(list(places), names)
    titled(axes[1], "loss of text held out: the base in grey, its adapter in colour")
    save(figure, path)


def read_options(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default=os.environ.get("PENSTOCK_DATA"), help="has batching/text/"
    )
    parser.add_argument("--steps", type=int, default=120, help="updates of each job")
    parser.add_argument("--base-steps", type=int, default=150, help="steps of the base before")
    parser.add_argument("--samples", type=int, default=400, help="of each text, at most")
    parser.add_argument("--length", type=int, default=128, help="bytes of a sample, at most")
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="more, for a larger model")
    parser.add_argument("--out", default="lora_adapters", help="folder of the adapters")
    parser.add_argument("--figure", default="lora_adapters.png")
    return parser.parse_args(arguments)


def train_together(base, texts, plans, base_losses, options):
    """Train all jobs and save them; the last report, and logits of each job's first sample."""
    with Jobs(base, max_tokens=8 * options.length) as jobs:
        add_jobs(jobs, texts, plans, options.steps)
        with Live(live_table(jobs.report(), plans, base_losses), refresh_per_second=4) as live:
            report = jobs.run(on_step=lambda now: live.update(live_table(now, plans, base_losses)))
        if not live.console.is_terminal:  # where rich ends no line
            print()
        jobs.save(options.out)
        return report, {
            name: logits_within(jobs.peft_model, name, each[0]) for name, each in texts.items()
        }


@torch.no_grad()
def logits_within(model, name, sample):
    """Logits of a job's sample by the model that has the adapters of all jobs."""
    model.set_adapter(name)
    return model.eval()(input_ids=sample[None]).logits


@torch.no_grad()
def load_with_peft(base, folder, sample, held_out):
    """Logits of a sample and the loss of others, by stock PEFT from what was saved."""
    model = PeftModel.from_pretrained(base, folder).eval()
    logits, loss = model(input_ids=sample[None]).logits, evaluate(model, held_out)
    model.unload()
    return logits, loss


def main(arguments=None):
    options = read_options(arguments)
    torch.set_num_threads(options.threads)
    # PEFT asks Transformers' models for it, by a name that these have given up.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
    texts = read_texts(options.data, options.samples, options.length)
    held_out = {name: each[-max(1, len(each) // 10) :] for name, each in texts.items()}
    texts = {name: each[: -len(held_out[name])] or each for name, each in texts.items()}
    plans = dict(zip(texts, PLANS, strict=True))
    base = make_base(options.hidden, options.layers, options.length)
    train_base(
        base, cut_text(read_sources(SOURCES_OF_BASE), None, options.length), options.base_steps
    )
    before = {name: evaluate(base, samples) for name, samples in held_out.items()}
    begin = time.perf_counter()
    report, logits = train_together(base, texts, plans, before, options)
    seconds = time.perf_counter() - begin
    after, differences = {}, {}
    for name, samples in held_out.items():
        folder = Path(options.out, "latest", name)
        found, after[name] = load_with_peft(base, folder, texts[name][0], samples)
        differences[name] = float((found - logits[name]).abs().max())
    print(report)
    rows = [
        (f"{name}: base, its adapter", f"{before[name]:.3f}, {after[name]:.3f}") for name in texts
    ]
    print(report_table(rows, title="loss of text held out, by stock PEFT"))
    print(f"logits of stock PEFT differ by at most {max(differences.values()):.1e}")
    print(f"four jobs took {format_seconds(seconds)}; the adapters are in {options.out}/latest")
    draw(report, plans, before, after, options.figure)
    return report, before, after, differences


if __name__ == "__main__":
    main()
