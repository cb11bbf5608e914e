"""The convolutional networks of SwapAdvisor's table, in plain torch.

Wide ResNet: Zagoruyko and Komodakis, arXiv 1605.07146, on the bottleneck ResNet of He et al. (arXiv
1512.03385) with all channels widened; Inception-V4: Szegedy et al., arXiv 1602.07261, figures 3 to
9; NASNet-A: Zoph et al., arXiv 1707.07012, figures 2 and 4.

Shapes in names: B batch, C channels, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Size = int | tuple[int, int]


class Classifier(nn.Module):
    """Features, an average over each map, a linear layer; returns the loss."""

    def __init__(self, features: nn.Module, num_channels: int, num_classes: int = 1000) -> None:
        super().__init__()
        self.features = features
        self.head = nn.Linear(num_channels, num_classes)

    def forward(self, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
        """The mean cross-entropy of a batch."""
        pooled_BC = self.features(images_BCHW).mean(dim=(2, 3))
        return F.cross_entropy(self.head(pooled_BC), labels_B)


class ConvolutionUnit(nn.Sequential):
    """Convolution, batch norm, ReLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: Size, *, stride: int = 1, padding: Size = 0
    ) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, each with batch norm, around a shortcut."""

    def __init__(self, inputs: int, inner: int, *, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.body = nn.Sequential(
            ConvolutionUnit(inputs, inner, 1),
            ConvolutionUnit(inner, inner, 3, stride=stride, padding=1),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """The sum of both ways, through a ReLU."""
        return F.relu(self.body(x_BCHW) + self.shortcut(x_BCHW))


def wide_resnet(blocks: Sequence[int] = (3, 8, 36, 3), width: int = 10) -> nn.Module:
    """ResNet-152 whose convolutions all have `width` times the channels."""
    channels = 64 * width
    layers: list[nn.Module] = [
        ConvolutionUnit(3, channels, 7, stride=2, padding=3),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    inputs = channels
    for stage, num_blocks in enumerate(blocks):
        inner = channels * 2**stage
        for block in range(num_blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(inputs, inner, stride=stride))
            inputs = 4 * inner
    return Classifier(nn.Sequential(*layers), inputs)


class Branches(nn.Module):
    """Several ways through, their channels one after the other."""

    def __init__(self, *ways: nn.Module) -> None:
        super().__init__()
        self.ways = nn.ModuleList(ways)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """All ways' channels."""
        return torch.cat([way(x_BCHW) for way in self.ways], dim=1)


def _chain(inputs: int, *units: tuple[int, Size] | tuple[int, Size, int, Size]) -> nn.Module:
    """Units of (channels, kernel) with padding that keeps the size, or with (stride, padding)."""
    layers = []
    for channels, kernel, *rest in units:
        if rest:
            stride, padding = rest
        else:
            sides = (kernel, kernel) if isinstance(kernel, int) else kernel
            stride, padding = 1, (sides[0] // 2, sides[1] // 2)
        assert isinstance(stride, int)
        layers.append(ConvolutionUnit(inputs, channels, kernel, stride=stride, padding=padding))
        inputs = channels
    return nn.Sequential(*layers)


def _inception_stem() -> list[nn.Module]:
    return [
        _chain(3, (32, 3, 2, 0), (32, 3, 1, 0), (64, 3)),
        Branches(nn.MaxPool2d(3, stride=2), _chain(64, (96, 3, 2, 0))),
        Branches(
            _chain(160, (64, 1), (96, 3, 1, 0)),
            _chain(160, (64, 1), (64, (1, 7)), (64, (7, 1)), (96, 3, 1, 0)),
        ),
        Branches(_chain(192, (192, 3, 2, 0)), nn.MaxPool2d(3, stride=2)),
    ]


def _average(inputs: int, outputs: int) -> nn.Module:
    pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(pool, ConvolutionUnit(inputs, outputs, 1))


def _inception_a() -> nn.Module:
    return Branches(
        _average(384, 96),
        _chain(384, (96, 1)),
        _chain(384, (64, 1), (96, 3)),
        _chain(384, (64, 1), (96, 3), (96, 3)),
    )


def _inception_b() -> nn.Module:
    return Branches(
        _average(1024, 128),
        _chain(1024, (384, 1)),
        _chain(1024, (192, 1), (224, (1, 7)), (256, (7, 1))),
        _chain(1024, (192, 1), (192, (1, 7)), (224, (7, 1)), (224, (1, 7)), (256, (7, 1))),
    )


def _inception_c() -> nn.Module:
    def fork(inputs: int) -> nn.Module:
        return Branches(_chain(inputs, (256, (1, 3))), _chain(inputs, (256, (3, 1))))

    return Branches(
        _average(1536, 256),
        _chain(1536, (256, 1)),
        nn.Sequential(_chain(1536, (384, 1)), fork(384)),
        nn.Sequential(_chain(1536, (384, 1), (448, (1, 3)), (512, (3, 1))), fork(512)),
    )


def inception_v4() -> nn.Module:
    """The stem, four blocks A, seven B, three C with reductions between; images of 299 x 299."""
    reduction_a = Branches(
        nn.MaxPool2d(3, stride=2),
        _chain(384, (384, 3, 2, 0)),
        _chain(384, (192, 1), (224, 3), (256, 3, 2, 0)),
    )
    reduction_b = Branches(
        nn.MaxPool2d(3, stride=2),
        _chain(1024, (192, 1), (192, 3, 2, 0)),
        _chain(1024, (256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3, 2, 0)),
    )
    blocks = [
        *_inception_stem(),
        *(_inception_a() for _ in range(4)),
        reduction_a,
        *(_inception_b() for _ in range(7)),
        reduction_b,
        *(_inception_c() for _ in range(3)),
    ]
    return Classifier(nn.Sequential(*blocks), 1536)


class Separable(nn.Module):
    """ReLU, depthwise and pointwise convolution, batch norm, twice."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, step in ((inputs, stride), (outputs, 1)):
            layers += [
                nn.ReLU(),
                nn.Conv2d(
                    channels,
                    channels,
                    kernel,
                    stride=step,
                    padding=kernel // 2,
                    groups=channels,
                    bias=False,
                ),
                nn.Conv2d(channels, outputs, 1, bias=False),
                nn.BatchNorm2d(outputs),
            ]
        self.body = nn.Sequential(*layers)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """The result."""
        return self.body(x_BCHW)


def _squeeze(inputs: int, outputs: int, *, stride: int = 1) -> nn.Module:
    """ReLU, 1x1 convolution, batch norm: what fits a cell's inputs to its channels."""
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False),
        nn.BatchNorm2d(outputs),
    )


class NormalCell(nn.Module):
    """Five sums of pairs of operations on two earlier results; keeps the size of the maps."""

    def __init__(self, earlier: int, last: int, channels: int, *, shrink_earlier: bool) -> None:
        super().__init__()
        self.fit_earlier = _squeeze(earlier, channels, stride=2 if shrink_earlier else 1)
        self.fit_last = _squeeze(last, channels)
        self.separable_last_5 = Separable(channels, channels, 5)
        self.separable_earlier_3 = Separable(channels, channels, 3)
        self.separable_earlier_5 = Separable(channels, channels, 5)
        self.separable_earlier_3_again = Separable(channels, channels, 3)
        self.separable_last_3 = Separable(channels, channels, 3)
        self.average = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        self.num_channels = 6 * channels

    def forward(self, earlier_BCHW: Tensor, last_BCHW: Tensor) -> Tensor:
        """Both inputs' combinations, one after the other."""
        earlier, last = self.fit_earlier(earlier_BCHW), self.fit_last(last_BCHW)
        sums = [
            self.separable_last_5(last) + self.separable_earlier_3(earlier),
            self.separable_earlier_5(earlier) + self.separable_earlier_3_again(earlier),
            self.average(last) + earlier,
            self.average(earlier) + self.average(earlier),
            self.separable_last_3(last) + last,
        ]
        return torch.cat([earlier, *sums], dim=1)


class ReductionCell(nn.Module):
    """As a normal cell, but it halves the maps."""

    def __init__(self, earlier: int, last: int, channels: int, *, shrink_earlier: bool) -> None:
        super().__init__()
        self.fit_earlier = _squeeze(earlier, channels, stride=2 if shrink_earlier else 1)
        self.fit_last = _squeeze(last, channels)
        self.separable_earlier_7 = Separable(channels, channels, 7, stride=2)
        self.separable_last_5 = Separable(channels, channels, 5, stride=2)
        self.separable_earlier_7_again = Separable(channels, channels, 7, stride=2)
        self.separable_earlier_5 = Separable(channels, channels, 5, stride=2)
        self.separable_sum_3 = Separable(channels, channels, 3)
        self.largest = nn.MaxPool2d(3, stride=2, padding=1)
        self.average_and_shrink = nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False)
        self.average = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        self.num_channels = 4 * channels

    def forward(self, earlier_BCHW: Tensor, last_BCHW: Tensor) -> Tensor:
        """Both inputs' combinations at half the size, one after the other."""
        earlier, last = self.fit_earlier(earlier_BCHW), self.fit_last(last_BCHW)
        first = self.separable_earlier_7(earlier) + self.separable_last_5(last)
        second = self.largest(last) + self.separable_earlier_7_again(earlier)
        third = self.average_and_shrink(last) + self.separable_earlier_5(earlier)
        fourth = self.largest(last) + self.separable_sum_3(first)
        fifth = self.average(first) + second
        return torch.cat([second, third, fourth, fifth], dim=1)


class NasNet(nn.Module):
    """NASNet-A for ImageNet: two reduction cells of the stem, then normal cells in three groups."""

    def __init__(self, num_repeats: int, penultimate_filters: int) -> None:
        super().__init__()
        filters = penultimate_filters // 24
        self.stem = nn.Sequential(nn.Conv2d(3, 96, 3, stride=2, bias=False), nn.BatchNorm2d(96))
        self.cells = nn.ModuleList()
        earlier = last = 96
        shrink = False
        kinds = ["stem", "stem"] + [*["normal"] * num_repeats, "reduction"] * 3
        channels = filters // 4
        for kind in kinds[:-1]:
            if kind == "normal":
                cell = NormalCell(earlier, last, channels, shrink_earlier=shrink)
            else:
                if kind == "reduction" or earlier != last:
                    channels *= 2
                cell = ReductionCell(earlier, last, channels, shrink_earlier=shrink)
            if kind == "stem" and len(self.cells) == 1:
                channels *= 2  # the normal cells begin with all filters
            shrink = kind != "normal"
            earlier, last = last, cell.num_channels
            self.cells.append(cell)
        self.num_channels = last

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """The maps of the last cell."""
        earlier = last = self.stem(images_BCHW)
        for cell in self.cells:
            earlier, last = last, cell(earlier, last)
        return F.relu(last)


def nasnet(num_repeats: int = 7, penultimate_filters: int = 4032) -> nn.Module:
    """NASNet-A (7 @ 4032): 25 cells, two in the stem, 21 normal, two reductions."""
    features = NasNet(num_repeats, penultimate_filters)
    return Classifier(features, features.num_channels)
