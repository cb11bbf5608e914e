"""Restore a noisy frame from a clear one in which everything has moved, by deformable convolution.

    python examples/deformable.py
    python examples/deformable.py --steps 600 --square --bound 4

Frames show discs and squares. The first one is noisy; in the second, everything is a few pixels
away. A small net learns from both where each tap of a deformable convolution has to look in the
second frame; the same net with a plain convolution in its place cannot reach it. `--square` learns
one number per pixel instead of an offset per tap, `--bound` clamps the offsets as hardware does. A
picture is saved.
"""

import argparse
import statistics
import time

import torch
from _shared import panels, progress_bar, save, titled
from torch import nn
from torch.nn.functional import mse_loss

from penstock.ops import deform_conv2d
from penstock.units import format_seconds

MOST_MOVED = 3  # pixels, in y and x


def draw_frames(count, size, generator):
    """A noisy frame, a clear one that has moved, and the clear first one."""
    grid = torch.arange(size + 2 * MOST_MOVED, dtype=torch.float32)
    scene = torch.zeros(count, len(grid), len(grid))
    for _ in range(5):
        y, x, radius, shade, kind = torch.rand(5, count, 1, 1, generator=generator)
        away_y = (grid[:, None] - y * len(grid)).abs()
        away_x = (grid - x * len(grid)).abs()
        disc, square = (away_y**2 + away_x**2).sqrt(), torch.maximum(away_y, away_x)
        away = torch.where(kind < 0.5, disc, square)
        cover = (2 + 4 * radius + 0.5 - away).clamp(0, 1)  # edges are a pixel wide
        scene = scene * (1 - cover) + (0.3 + 0.7 * shade) * cover
    moves = torch.randint(0, 2 * MOST_MOVED + 1, (count, 2), generator=generator).tolist()
    middle = slice(MOST_MOVED, MOST_MOVED + size)
    clear = scene[:, middle, middle]
    moved = [each[y : y + size, x : x + size] for each, (y, x) in zip(scene, moves, strict=True)]
    noisy = clear + 0.4 * torch.randn(clear.shape, generator=generator)
    return noisy[:, None], torch.stack(moved)[:, None], clear[:, None]


class Restorer(nn.Module):
    """Features of the second frame, gathered where both frames say, to the first one restored."""

    def __init__(self, width, *, is_deformable, square=False, bound=None):
        super().__init__()
        self.is_deformable, self.square, self.bound = is_deformable, square, bound
        self.look = nn.Sequential(
            nn.Conv2d(2, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=2, dilation=2),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=4, dilation=4),
            nn.ReLU(),
        )
        self.offsets = nn.Conv2d(width, 1 if square else 18, 3, padding=1)
        for parameter in self.offsets.parameters():
            nn.init.zeros_(parameter)
        self.features = nn.Conv2d(1, width, 3, padding=1)
        self.align = nn.Conv2d(width, width, 3, padding=1)
        self.restore = nn.Sequential(
            nn.ReLU(), nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1)
        )

    def forward(self, noisy, moved):
        seen, features = self.look(torch.cat([noisy, moved], 1)), self.features(moved)
        weight, bias = self.align.weight, self.align.bias
        if self.is_deformable:
            offset = self.offsets(seen)
            aligned = deform_conv2d(
                features, offset, weight, bias, padding=1, bound=self.bound, square=self.square
            )
        else:
            aligned = self.align(features)
        return self.restore(torch.cat([aligned, seen], 1))


def train(net, options, name):
    """Losses of all steps, and the median seconds of one."""
    optimizer = torch.optim.Adam(net.parameters(), options.rate)
    generator = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    with progress_bar() as bar:
        task = bar.add_task(name, total=options.steps)
        for _ in range(options.steps):
            noisy, moved, clear = draw_frames(options.batch_size, options.size, generator)
            begin = time.perf_counter()
            loss = mse_loss(net(noisy, moved), clear)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
            losses.append(loss.item())
            bar.update(task, advance=1, description=f"{name}: loss {losses[-1]:.4f}")
    return losses, statistics.median(seconds)


def draw_figure(curves, frames, restored, path):
    """Losses over the training, and a pair of frames with what each net makes of it."""
    figure, axes = panels(4 + len(restored), width=14, height=2.8)
    for name, losses in curves.items():
        step = max(len(losses) // 50, 1)
        means = [statistics.fmean(losses[k : k + step]) for k in range(0, len(losses), step)]
        axes[0].semilogy(range(0, len(losses), step), means, label=name)
    axes[0].legend(frameon=False)
    titled(axes[0], "loss by step")
    names = ("noisy frame", "moved frame", "truth")
    images = {**dict(zip(names, frames, strict=True)), **restored}
    for axis, (name, image) in zip(axes[1:], images.items(), strict=True):
        axis.imshow(image[0, 0].numpy(), cmap="gray", vmin=0, vmax=1)
        axis.axis("off")
        titled(axis, name)
    save(figure, path)


def read_options(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--bound", type=float)
    parser.add_argument("--square", action="store_true")
    parser.add_argument("--figure", default="deformable.png")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = read_options(arguments)
    curves, restored, errors = {}, {}, {}
    frames = draw_frames(64, options.size, torch.Generator().manual_seed(2))
    for name, is_deformable in (("deformable", True), ("plain", False)):
        torch.manual_seed(0)
        net = Restorer(
            *(options.width,), is_deformable=is_deformable, square=options.square,
            bound=options.bound,
        )  # fmt: skip
        curves[name], seconds = train(net, options, name)
        with torch.no_grad():
            restored[name] = net(*frames[:2])
        errors[name] = mse_loss(restored[name], frames[2]).item()
        print(f"{name}: mean squared error {errors[name]:.4f}, {format_seconds(seconds)} a step")
    draw_figure(curves, frames, restored, options.figure)
    return errors, curves


if __name__ == "__main__":
    main()
