"""Five training steps of a small transformer whose saved activations go to a file and come back.

    python examples/offload_training.py /mnt/nvme

The argument is a directory on a local disk. Nothing is left in it.
"""

import argparse

import torch
from torch import nn

import penstock

# B batch, T tokens, C channels, V vocabulary
VOCABULARY, CHANNELS, HEADS, LAYERS = 256, 256, 4, 4
BATCH, TOKENS, STEPS = 8, 256, 5


class Transformer(nn.Module):
    """A decoder that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, CHANNELS)
        layer = nn.TransformerEncoderLayer(
            CHANNELS, HEADS, 4 * CHANNELS, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(CHANNELS, VOCABULARY)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        mask_TT = nn.Transformer.generate_square_subsequent_mask(
            bytes_BT.shape[1], device=bytes_BT.device
        )
        x_BTC = self.layers(self.embed(bytes_BT), mask=mask_TT, is_causal=True)
        return self.head(x_BTC)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", help="an existing directory on a local disk")
    parser.add_argument("--policy", choices=["auto", "all"], default="auto")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Transformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Every byte follows from the one before it, so the loss has somewhere to go.
    start_B1 = torch.randint(VOCABULARY, (BATCH, 1), device=device)
    bytes_BT = (start_B1 + 7 * torch.arange(TOKENS + 1, device=device)) % VOCABULARY

    with penstock.offload(arguments.store, policy=arguments.policy) as offload:
        for step in range(STEPS):
            logits_BTV = model(bytes_BT[:, :-1])
            loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), bytes_BT[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss.item():.4f}")

    print(offload.report())
    offload.close()


if __name__ == "__main__":
    main()
