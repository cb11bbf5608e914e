"""An ordinary training script, which each arm runs in a process of its own (`__main__.py`)."""

from __future__ import annotations

import contextlib
import hashlib
import sysconfig
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.demo._config import DemoConfig, DemoError
from penstock.cli.demo._plans import PlannedArm

if TYPE_CHECKING:
    import torch

_CORPUS_BYTES = 4 << 20
_LEARNING_RATE = 1.5e-4


def train(
    config: DemoConfig,
    turns: Iterable[object],
    *,
    checkpoint: bool,
    planned: PlannedArm | None = None,
    say: Callable[..., None],
) -> None:
    """Train the model in an ordinary loop, without Penstock but for planned steps.

    The loop takes one step per item of `turns`. It calls `say` with keyword arguments after
    loading, after every step, and at the end.
    """
    corpus = load_text()
    model, optimizer = make_trainee(config)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    loaded_bytes = _watch_peak()
    say(num_parameters=model.num_parameters())

    def eager_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with contextlib.ExitStack() as stack:
        step: Callable[[Any], torch.Tensor] = eager_step
        if planned is not None:
            step = stack.enter_context(planned.bind(model, optimizer))
        for _ in turns:
            start = time.perf_counter()
            loss = step(draw_batch(corpus, config)).item()
            say(seconds=time.perf_counter() - start, loss=loss)
        peak_bytes = model_bytes + _read_status("VmHWM") - loaded_bytes
        say(peak_bytes=peak_bytes, weights_sha256=_hash_weights(model))


def load_text() -> torch.Tensor:
    """Return the text to learn, a byte a token."""
    import torch

    return torch.frombuffer(bytearray(_read_corpus()), dtype=torch.uint8)


def make_trainee(config: DemoConfig) -> tuple[Any, torch.optim.Optimizer]:
    """Make the model and its optimizer, the same in every process."""
    import torch

    torch.manual_seed(config.seed)
    model = _make_model(config)
    return model, torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)


def _make_model(config: DemoConfig) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2Config(
        vocab_size=256,  # one token per byte
        n_positions=config.sequence_length,
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(gpt2).train()


def _read_corpus() -> bytes:
    """Read the first Python sources of the standard library, in a fixed order."""
    directory = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(directory.glob("*.py")) + sorted(directory.glob("[a-z]*/*.py")):
        text += path.read_bytes()
        if len(text) >= _CORPUS_BYTES:
            break
    if not text:
        raise DemoError(f"no Python sources in {directory}; this Python came without them")
    return bytes(text[:_CORPUS_BYTES])


def draw_batch(text: torch.Tensor, config: DemoConfig) -> dict[str, torch.Tensor]:
    """Draw a batch of random passages, int64 of shape (batch_size, sequence_length)."""
    import torch

    starts = torch.randint(len(text) - config.sequence_length, (config.batch_size,)).tolist()
    passages = [text[start : start + config.sequence_length] for start in starts]
    batch = torch.stack(passages).long()
    return {"input_ids": batch, "labels": batch}


def _hash_weights(model: Any) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def _watch_peak() -> int:
    """Reset the kernel's record of the peak; return the bytes in RAM now."""
    # Where the kernel refuses, the record still holds the peak of loading. The result is then an
    # upper bound, and an exact one as soon as training needs more than loading did.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _read_status("VmRSS")


def _read_status(field: str) -> int:
    """Read a size of this process from the kernel, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise DemoError(f"the kernel does not report {field} in /proc/self/status")
