"""The largest curvature of a small transformer's loss while it trains, with a picture.

    python examples/curvature.py --steps 200 --figure curvature.png

Every few steps the largest eigenvalues of the Hessian of the loss on a fixed batch are found,
starting from those of the time before. With gradient descent of step size r the curvature rises
until it is about 2 / r, and stays around there: the edge of stability (Cohen et al. 2021).
"""

import argparse

import torch
from _shared import panels, progress_bar, save, titled
from torch import nn

from penstock.spectral import eigs, hessian

VOCABULARY, CHANNELS, HEADS, LAYERS, TOKENS = 16, 24, 2, 2, 12


class Transformer(nn.Module):
    """Predicts each token from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, CHANNELS)
        self.place = nn.Parameter(torch.randn(TOKENS, CHANNELS) / 10)
        self.norms = nn.ModuleList(nn.LayerNorm(CHANNELS) for _ in range(2 * LAYERS))
        self.mixes = nn.ModuleList(nn.Linear(CHANNELS, 3 * CHANNELS) for _ in range(LAYERS))
        self.outs = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(LAYERS))
        self.ups = nn.ModuleList(nn.Linear(CHANNELS, 2 * CHANNELS) for _ in range(LAYERS))
        self.downs = nn.ModuleList(nn.Linear(2 * CHANNELS, CHANNELS) for _ in range(LAYERS))
        self.head = nn.Linear(CHANNELS, VOCABULARY)
        self.register_buffer("hidden", torch.full((TOKENS, TOKENS), -1e9).triu(1))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text) + self.place
        for layer in range(LAYERS):
            mixed = self.mixes[layer](self.norms[2 * layer](x))
            q, k, v = (
                each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in mixed.chunk(3, -1)
            )
            # Written out: its second derivatives are there on every device.
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + self.hidden
            x = x + self.outs[layer]((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
            x = x + self.downs[layer](torch.tanh(self.ups[layer](self.norms[2 * layer + 1](x))))
        return self.head(x)


def draw_batch(num_texts: int) -> torch.Tensor:
    """Return texts whose tokens follow a random rule of the two before, mostly."""
    rule = torch.randint(VOCABULARY, (VOCABULARY, VOCABULARY))
    text = torch.randint(VOCABULARY, (num_texts, TOKENS + 1))
    for at in range(2, TOKENS + 1):
        followed = rule[text[:, at - 2], text[:, at - 1]]
        text[:, at] = torch.where(torch.rand(num_texts) < 0.9, followed, text[:, at])
    return text


def draw(path: str, losses: list[float], curves: dict[int, list[float]], rate: float) -> None:
    figure, (left, right) = panels(2, width=9, height=3.5)
    left.plot(losses)
    left.set_xlabel("step")
    titled(left, "loss")
    for place in range(len(next(iter(curves.values())))):
        values = [each[-1 - place] for each in curves.values()]
        right.plot(list(curves), values, "o-", markersize=3, label=f"eigenvalue {place + 1}")
    right.axhline(2 / rate, color="grey", linestyle="--", label="2 / step size")
    right.set_xlabel("step")
    right.legend(frameon=False, fontsize=8)
    titled(right, "largest eigenvalues of the Hessian")
    save(figure, path)


def main(arguments: list[str] | None = None) -> tuple[list[float], dict[int, list[float]]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps from one look to the next")
    parser.add_argument("--count", type=int, default=3, help="eigenvalues")
    parser.add_argument("--texts", type=int, default=64, help="of the batch")
    parser.add_argument("--rate", type=float, default=0.3, help="step size of gradient descent")
    parser.add_argument("--figure", default="curvature.png")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model, batch = Transformer(), draw_batch(options.texts)

    def loss_of() -> torch.Tensor:
        scores = model(batch[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    operator = hessian(loss_of, model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate)
    losses, curves, start = [], {}, None
    with progress_bar() as progress:
        task = progress.add_task("training", total=options.steps)
        for step in range(options.steps):
            if step % options.every == 0:
                values, start = eigs(operator, options.count, tol=1e-3, start=start)
                curves[step] = values.tolist()
                progress.update(task, description=f"largest curvature {values[-1]:.2f}")
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            progress.advance(task)
    print(
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}, "
        f"largest curvature {max(curves.items())[1][-1]:.2f}"
    )
    draw(options.figure, losses, curves, options.rate)
    return losses, curves


if __name__ == "__main__":
    main()
