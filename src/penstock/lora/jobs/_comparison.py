"""A trial of a new adapter: packed samples against stock PEFT, and beside others against alone.

Whatever a model does across samples (positions of its own, convolutions or recurrences over tokens,
masks, experts with a capacity) shows as another result, and refuses the model by name.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.lora._adapters import Adapter
from penstock.lora.jobs._attention import PackingError
from penstock.lora.jobs._data import IGNORED, TokenSample
from penstock.lora.jobs._losses import sum_cross_entropy
from penstock.lora.jobs._micro_batch import BLOCK_ROWS, MicroBatch, TokenChunk, join_targets
from penstock.lora.jobs._packed_model import PackedModel, no_gradient_message
from penstock.lora.jobs._row_sizes import RowSizes

_SHORT_TOKENS = 13
_SINGLE_ROUNDINGS = 64  # times eps and sqrt(layers): rounding of a pass whose products are others


@dataclass(frozen=True)
class Trial:
    """A new adapter, and the passes that are compared.

    Attributes:
        packed: The model on micro-batches.
        job: Name of the job.
        adapters: By layer the parameters of its adapter.
        sizes: Rows of micro-batches.
        most_tokens: Tokens of the longest sample that the model knows.
    """

    packed: PackedModel
    job: str
    adapters: Mapping[str, Adapter]
    sizes: RowSizes
    most_tokens: int

    def run(self) -> str:
        """Compare, and return the reason why bits depend on neighbours; empty where they do not.

        Raises:
            ValueError: The model gives packed samples other logits than stock PEFT gives each
                alone, cannot be run on packed samples, or gives an adapter no gradient.
        """
        kind = type(self.packed.model).__name__
        try:
            with _fill(self.adapters):
                short, long = self._make_samples()
                stock = [self._run_stock(sample) for sample in (short, long)]
                with self.packed.open():
                    packed = self._run_packed(short, long)
                    self._compare(kind, stock, packed)
                    return self._compare_bits(short, long)
        except torch.OutOfMemoryError:
            raise
        except (PackingError, TypeError, AttributeError, LookupError, RuntimeError) as error:
            raise ValueError(
                f"{kind} cannot be run on samples of several jobs back to back: {error}. Train "
                "its jobs with stock PEFT one after the other"
            ) from error

    def _make_samples(self) -> tuple[TokenSample, TokenSample]:
        vocabulary = self.packed.model.get_input_embeddings().num_embeddings
        generator = torch.Generator().manual_seed(1)
        short = min(_SHORT_TOKENS, self.most_tokens)
        long = min(self.most_tokens, self.sizes.most - 2 * BLOCK_ROWS)

        def make(length: int) -> TokenSample:
            tokens = torch.randint(vocabulary, (length,), generator=generator, device="cpu")
            targets = torch.full_like(tokens, IGNORED)
            targets[:-1] = tokens[1:]
            return TokenSample(tokens, targets)

        return make(short), make(max(1, long))

    def _make_chunk(self, *samples: TokenSample, dropout: bool) -> TokenChunk:
        adapters = {
            name: Adapter(
                each.down.detach().requires_grad_(),
                each.up.detach().requires_grad_(),
                each.scaling,
                each.dropout if dropout else 0.0,
            )
            for name, each in self.adapters.items()
        }
        seeds = {name: number for number, name in enumerate(self.adapters)}
        return TokenChunk(self.job, 0, samples, adapters, seeds)

    @torch.no_grad()
    def _run_stock(self, sample: TokenSample) -> Tensor:
        model = self.packed.model
        resting = [module for module in model.modules() if not module.training]
        try:
            model.train()
            for layer in self.packed.find_layers().values():
                layer.lora_dropout.eval()
            return model(input_ids=sample.tokens[None].to(self.packed.device)).logits[0]
        finally:
            model.train()
            for module in resting:
                module.training = False

    @torch.no_grad()
    def _run_packed(self, *samples: TokenSample) -> list[Tensor]:
        chunks = [self._make_chunk(sample, dropout=False) for sample in samples]
        batch = MicroBatch(chunks, self.sizes.most, self.packed.device)
        logits = self.packed.run(batch)
        if not self.packed.num_attentions:
            raise PackingError("its attention does not go through Transformers' interface")
        return batch.split(logits)

    def _compare(self, kind: str, stock: list[Tensor], packed: list[Tensor]) -> None:
        config = self.packed.model.config
        layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
        eps = torch.finfo(stock[0].dtype).eps
        for expected, found in zip(stock, packed, strict=True):
            scale = float(expected.abs().max())
            error = float((found - expected).abs().max())
            limit = _SINGLE_ROUNDINGS * eps * math.sqrt(layers) * scale
            if not error <= limit:
                raise ValueError(
                    f"{kind} gives samples back to back other logits than each alone (by "
                    f"{error:.3g} of {scale:.3g}; rounding explains {limit:.2g}): something of it "
                    "depends on the samples beside it, such as positions that ignore position_ids, "
                    "masks, convolutions, recurrences or dropout. Train its jobs with stock PEFT "
                    "one after the other"
                )

    def _compare_bits(self, short: TokenSample, long: TokenSample) -> str:
        """Compare losses and gradients of a chunk alone with those beside others."""
        with _count_rows(self.packed.model) as others:
            alone = self._differentiate([self._make_chunk(short, dropout=True)], 0)
        if others:
            return f"layer {others[0]} computes other rows than one a token"
        for module in self.packed.model.modules():
            if (name := _find_unknown_product(module)) is not None:
                return f"products of {name} were not probed"
        first, last = self._make_chunk(short, dropout=True), self._make_chunk(short, dropout=True)
        beside = self._make_chunk(long, dropout=True)
        for chunks, index in (([first, beside], 0), ([beside, last], 1)):
            loss, gradients = self._differentiate(chunks, index)
            if loss != alone[0] or not all(map(torch.equal, gradients, alone[1])):
                return "a trial gave a chunk beside another one other bits than alone"
        return ""

    def _differentiate(self, chunks: list[TokenChunk], index: int) -> tuple[float, list[Tensor]]:
        num_rows = self.sizes.fit(sum(chunk.num_rows for chunk in chunks))
        batch = MicroBatch(chunks, num_rows, self.packed.device)
        parts = batch.split(self.packed.run(batch))
        losses = [
            sum_cross_entropy(part, join_targets(chunk, part.device))
            for part, chunk in zip(parts, chunks, strict=True)
        ]
        if not losses[index].requires_grad:
            raise PackingError(no_gradient_message())
        torch.autograd.backward(losses)
        leaves = [each for a in chunks[index].adapters.values() for each in (a.down, a.up)]
        gradients = [leaf.grad for leaf in leaves]
        for chunk in chunks:
            for each in chunk.adapters.values():
                each.down.grad = each.up.grad = None
        found = [gradient for gradient in gradients if gradient is not None]
        if len(found) != len(leaves):
            raise PackingError(no_gradient_message())
        return float(losses[index].detach()), found


@contextlib.contextmanager
def _fill(adapters: Mapping[str, Adapter]) -> Iterator[None]:
    """Give the matrices B random numbers for the time: with zeros an adapter does nothing."""
    saved = [each.up.detach().clone() for each in adapters.values()]
    generator = torch.Generator().manual_seed(2)
    try:
        for each in adapters.values():
            noise = (
                torch.randn(each.up.shape, generator=generator, dtype=torch.float32, device="cpu")
                * 0.02
            )
            each.up.data.copy_(noise)
        yield
    finally:
        for each, before in zip(adapters.values(), saved, strict=True):
            each.up.data.copy_(before)


@contextlib.contextmanager
def _count_rows(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that gets the names of linear layers whose rows are not the tokens."""
    wrong: list[str] = []
    shapes: list[tuple[str, int]] = []
    embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    expected: list[int] = []

    def note(name: str) -> Any:
        return lambda module, inputs: shapes.append((name, inputs[0].shape[:-1].numel()))

    handles = [
        embedding.register_forward_pre_hook(
            lambda module, inputs: expected.append(inputs[0].numel())
        )
    ]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".lora_" not in f".{name}":
            handles.append(module.register_forward_pre_hook(note(name)))
    try:
        yield wrong
    finally:
        for handle in handles:
            handle.remove()
        wrong += [name for name, rows in shapes if expected and rows != expected[0]]


def _find_unknown_product(module: nn.Module) -> str | None:
    """Return a module's name if it has matrices that are neither linear layers nor tables."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear | Conv1D | nn.Embedding):
        return None
    has_matrix = any(each.dim() > 1 for each in module.parameters(recurse=False))
    return type(module).__name__ if has_matrix else None
