"""Five training steps of a small transformer in a third of the memory that they would take.

    python examples/planned_training.py /mnt/nvme

The argument is a directory on a local disk. Nothing is left in it.
"""

import argparse

import torch
from torch import nn

import penstock

VOCABULARY, CHANNELS, HEADS, LAYERS = 256, 256, 4, 4
BATCH, TOKENS, STEPS = 8, 128, 5


class Transformer(nn.Module):
    """Predicts each byte of a text from those around it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, CHANNELS)
        layer = nn.TransformerEncoderLayer(
            CHANNELS, HEADS, 4 * CHANNELS, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(CHANNELS, VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(text)))


def loss_of(scores: torch.Tensor, batch: tuple[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch[0].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", help="a directory on a local disk")
    store = parser.parse_args().store
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = (torch.randint(VOCABULARY, (BATCH, TOKENS)),)

    graph = penstock.capture(model, optimizer, batch, loss=loss_of)
    full = penstock.plan(graph, machine="h200", time_limit=2)
    budget = full.peak_device_bytes // 3
    step = penstock.fit(
        *(model, optimizer, batch),
        loss=loss_of,
        device_memory=budget,
        store=store,
        time_limit=10,
    )
    with step:
        for number in range(STEPS):
            print(f"step {number}: loss {step(batch).item():.4f}")
        print(step.report())


if __name__ == "__main__":
    main()
