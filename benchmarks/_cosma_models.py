"""The ten networks of COSMA's table (arXiv 2311.18246, V-A), in plain torch, for inference.

Layer tables as published: ResNet-50 (He et al., arXiv 1512.03385, with the stride in the 3x3),
DenseNet-121 (Huang et al., 1608.06993), ResNeXt-50 32x4d (Xie et al., 1611.05431), R(2+1)D-18
(Tran et al., 1711.11248), S3D (Xie et al., 1712.04851), FCN (Long et al., 1411.4038) and DeepLabV3
(Chen et al., 1706.05587) on a dilated ResNet-50, L-RASPP on MobileNetV3-Large (Howard et al.,
1905.02244), the base Transformer (Vaswani et al., 1706.03762) and ViT-B/16 (Dosovitskiy et al.,
2010.11929).
Numbers of parameters are those of the usual implementations; a test holds them.

Shapes in names: B batch, C channels, T frames or tokens, H and W height and width, D features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[], nn.Module]


class Unit(nn.Sequential):
    """Convolution in two or three dimensions, batch norm, activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, ...] = 1,
        *,
        stride: int | tuple[int, ...] = 1,
        dilation: int = 1,
        groups: int = 1,
        act: Activation | None = nn.ReLU,
    ) -> None:
        volume = isinstance(kernel, tuple) and len(kernel) == 3
        sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding = tuple(dilation * (side // 2) for side in sides)
        shape = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        convolution: Any = nn.Conv3d if volume else nn.Conv2d
        norm = nn.BatchNorm3d if volume else nn.BatchNorm2d
        layers = [convolution(inputs, outputs, kernel, bias=False, **shape), norm(outputs)]
        super().__init__(*layers, *([act()] if act else []))


class Pooled(nn.Module):
    """Features, their average over each map, a linear layer."""

    def __init__(self, features: nn.Module, num_channels: int, num_classes: int) -> None:
        super().__init__()
        self.features, self.head = features, nn.Linear(num_channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        maps = self.features(images)
        return self.head(maps.mean(dim=tuple(range(2, maps.dim()))))


class Residual(nn.Module):
    """The sum of a body and a shortcut, through a ReLU."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Body first, as usual."""
        y = self.body(x)
        return F.relu(y + self.shortcut(x))


def resnet_features(
    *, groups: int = 1, width: int = 64, dilations: Sequence[int] = (1, 1, 1, 1)
) -> nn.Sequential:
    """ResNet-50 up to its last maps; stages with a dilation keep their size."""
    layers: list[nn.Module] = [Unit(3, 64, 7, stride=2), nn.MaxPool2d(3, 2, padding=1)]
    inputs, before = 64, 1
    for stage, num_blocks in enumerate((3, 4, 6, 3)):
        inner = groups * width * 2**stage
        outputs, dilation = 256 * 2**stage, dilations[stage]
        for block in range(num_blocks):
            first = block == 0
            stride = 2 if first and stage and dilation == 1 else 1
            here = before if first else dilation
            body = nn.Sequential(
                Unit(inputs, inner),
                Unit(inner, inner, 3, stride=stride, dilation=here, groups=groups),
                Unit(inner, outputs, act=None),
            )
            shortcut = Unit(inputs, outputs, stride=stride, act=None) if first else None
            layers.append(Residual(body, shortcut))
            inputs = outputs
        before = dilation
    return nn.Sequential(*layers)


class DenseLayer(nn.Module):
    """Norm, 1x1, 3x3 on all earlier maps of the block; the result joins them."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU())
        self.inner = Unit(inputs, 4 * growth)
        self.outer = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, earlier: list[Tensor]) -> Tensor:
        """New maps."""
        x = torch.cat(earlier, 1) if len(earlier) > 1 else earlier[0]
        return self.outer(self.inner(self.norm(x)))


class DenseBlock(nn.Module):
    """Layers of which each reads what all before it made."""

    def __init__(self, num_layers: int, inputs: int, growth: int) -> None:
        super().__init__()
        sizes = [inputs + growth * layer for layer in range(num_layers)]
        self.layers = nn.ModuleList(DenseLayer(size, growth) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """All maps, one behind the other."""
        maps = [x]
        for layer in self.layers:
            maps.append(layer(maps))
        return torch.cat(maps, 1)


def densenet(growth: int = 32) -> nn.Module:
    """DenseNet-121."""
    channels = 64
    layers: list[nn.Module] = [Unit(3, channels, 7, stride=2), nn.MaxPool2d(3, 2, padding=1)]
    blocks = (6, 12, 24, 16)
    for index, num_layers in enumerate(blocks):
        layers.append(DenseBlock(num_layers, channels, growth))
        channels += growth * num_layers
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        if index + 1 < len(blocks):
            half = channels // 2
            layers += [nn.Conv2d(channels, half, 1, bias=False), nn.AvgPool2d(2)]
            channels = half
    return Pooled(nn.Sequential(*layers), channels, 1000)


def r2plus1d(num_classes: int = 400) -> nn.Module:
    """R(2+1)D-18."""
    layers: list[nn.Module] = [
        Unit(3, 45, (1, 7, 7), stride=(1, 2, 2)),
        Unit(45, 64, (3, 1, 1)),
    ]
    inputs = 64
    for stage in range(4):
        outputs = 64 * 2**stage
        for block in range(2):
            stride = 2 if stage and block == 0 else 1
            # Both convolutions of a block have the middle width of the first one.
            middle = inputs * outputs * 27 // (inputs * 9 + 3 * outputs)
            body = nn.Sequential(
                *_halves(inputs, middle, outputs, stride=stride, act=True),
                *_halves(outputs, middle, outputs, stride=1, act=False),
            )
            shortcut = None
            if inputs != outputs:
                shortcut = Unit(inputs, outputs, (1, 1, 1), stride=(2, 2, 2), act=None)
            layers.append(Residual(body, shortcut))
            inputs = outputs
    return Pooled(nn.Sequential(*layers), inputs, num_classes)


def _halves(
    inputs: int, middle: int, outputs: int, *, stride: int, act: bool
) -> tuple[nn.Module, nn.Module]:
    """A 3x3x3 convolution in two steps: within frames, then across them."""
    return (
        Unit(inputs, middle, (1, 3, 3), stride=(1, stride, stride)),
        Unit(middle, outputs, (3, 1, 1), stride=(stride, 1, 1), act=nn.ReLU if act else None),
    )


class Inception(nn.Module):
    """S3D's block: four branches, of which two are separable, one behind the other."""

    def __init__(self, inputs: int, first: int, a: tuple[int, int], b: tuple[int, int], last: int):
        super().__init__()
        self.first = Unit(inputs, first, (1, 1, 1))
        self.a = nn.Sequential(
            Unit(inputs, a[0], (1, 1, 1)), *_halves(*a, a[1], stride=1, act=True)
        )
        self.b = nn.Sequential(
            Unit(inputs, b[0], (1, 1, 1)), *_halves(*b, b[1], stride=1, act=True)
        )
        self.last = nn.Sequential(nn.MaxPool3d(3, 1, padding=1), Unit(inputs, last, (1, 1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        """All maps."""
        return torch.cat([self.first(x), self.a(x), self.b(x), self.last(x)], 1)


def s3d(num_classes: int = 400) -> nn.Module:
    """S3D: Inception-V1 in time and space, separable."""
    spatial = nn.MaxPool3d((1, 3, 3), (1, 2, 2), padding=(0, 1, 1))
    stem = Unit(3, 64, (1, 7, 7), stride=(1, 2, 2)), Unit(64, 64, (7, 1, 1), stride=(2, 1, 1))
    features = nn.Sequential(
        *stem,
        spatial,
        Unit(64, 64, (1, 1, 1)),
        *_halves(64, 192, 192, stride=1, act=True),
        spatial,
        Inception(192, 64, (96, 128), (16, 32), 32),
        Inception(256, 128, (128, 192), (32, 96), 64),
        nn.MaxPool3d(3, 2, padding=1),
        Inception(480, 192, (96, 208), (16, 48), 64),
        Inception(512, 160, (112, 224), (24, 64), 64),
        Inception(512, 128, (128, 256), (24, 64), 64),
        Inception(512, 112, (144, 288), (32, 64), 64),
        Inception(528, 256, (160, 320), (32, 128), 128),
        nn.MaxPool3d(2, 2),
        Inception(832, 256, (160, 320), (32, 128), 128),
        Inception(832, 384, (192, 384), (48, 128), 128),
    )
    return Pooled(features, 1024, num_classes)


class Segmenter(nn.Module):
    """Features, a head on them, and its scores enlarged to the image."""

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features, self.head = features, head

    def forward(self, images: Tensor) -> Tensor:
        """Scores of each pixel."""
        scores = self.head(self.features(images))
        return F.interpolate(scores, images.shape[-2:], mode="bilinear", align_corners=False)


def _dilated() -> nn.Sequential:
    return resnet_features(dilations=(1, 1, 2, 4))


def fcn(num_classes: int = 21) -> nn.Module:
    """FCN on ResNet-50."""
    head = nn.Sequential(Unit(2048, 512, 3), nn.Dropout(0.1), nn.Conv2d(512, num_classes, 1))
    return Segmenter(_dilated(), head)


class PyramidPooling(nn.Module):
    """DeepLab's five branches of different dilations, joined."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.point = Unit(inputs, outputs)
        self.dilated = nn.ModuleList(Unit(inputs, outputs, 3, dilation=d) for d in (12, 24, 36))
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), Unit(inputs, outputs))
        self.project = nn.Sequential(Unit(5 * outputs, outputs), nn.Dropout(0.5))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Maps of the size of x."""
        branches = [self.point(x_BCHW), *(branch(x_BCHW) for branch in self.dilated)]
        size = x_BCHW.shape[-2:]
        pooled = F.interpolate(self.pooled(x_BCHW), size, mode="bilinear", align_corners=False)
        return self.project(torch.cat([*branches, pooled], 1))


def deeplab(num_classes: int = 21) -> nn.Module:
    """DeepLabV3 on ResNet-50."""
    head = nn.Sequential(
        PyramidPooling(2048, 256), Unit(256, 256, 3), nn.Conv2d(256, num_classes, 1)
    )
    return Segmenter(_dilated(), head)


class SqueezeExcite(nn.Module):
    """Channels are scaled by what two small layers make of their averages."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, squeezed, 1)
        self.second = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """x, scaled."""
        scale = self.first(F.adaptive_avg_pool2d(x_BCHW, 1)).relu()
        return F.hardsigmoid(self.second(scale)) * x_BCHW


def _eighth(channels: float) -> int:
    """The nearest multiple of 8 that is not below nine tenths."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


class InvertedResidual(nn.Module):
    """MobileNetV3's block: expand, depthwise, squeeze, project."""

    def __init__(
        self,
        inputs: int,
        kernel: int,
        expanded: int,
        outputs: int,
        *,
        squeeze: bool,
        act: Activation,
        stride: int,
        dilation: int,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if expanded != inputs:
            layers.append(Unit(inputs, expanded, act=act))
        depthwise = {"stride": stride, "dilation": dilation, "groups": expanded}
        layers.append(Unit(expanded, expanded, kernel, act=act, **depthwise))
        if squeeze:
            layers.append(SqueezeExcite(expanded, _eighth(expanded / 4)))
        self.body = nn.Sequential(*layers, Unit(expanded, outputs, act=None))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """With the sum, where shapes allow."""
        return x_BCHW + self.body(x_BCHW) if self.adds else self.body(x_BCHW)


# kernel, expanded, outputs, squeeze and excite, hard swish, stride, dilation
_MOBILENET_V3 = (
    (3, 16, 16, False, False, 1, 1),
    (3, 64, 24, False, False, 2, 1),
    (3, 72, 24, False, False, 1, 1),
    (5, 72, 40, True, False, 2, 1),
    (5, 120, 40, True, False, 1, 1),
    (5, 120, 40, True, False, 1, 1),
    (3, 240, 80, False, True, 2, 1),
    (3, 200, 80, False, True, 1, 1),
    (3, 184, 80, False, True, 1, 1),
    (3, 184, 80, False, True, 1, 1),
    (3, 480, 112, True, True, 1, 1),
    (3, 672, 112, True, True, 1, 1),
    (5, 672, 160, True, True, 1, 2),  # dilated instead of strided
    (5, 960, 160, True, True, 1, 2),
    (5, 960, 160, True, True, 1, 2),
)
_LOW_LEVEL = 5  # layers up to the maps of an eighth of the image


class LiteSegmenter(nn.Module):
    """L-RASPP: two depths of MobileNetV3, the deeper one gated by its average."""

    def __init__(self, num_classes: int = 21) -> None:
        super().__init__()
        layers: list[nn.Module] = [Unit(3, 16, 3, stride=2, act=nn.Hardswish)]
        inputs = 16
        for kernel, expanded, outputs, squeeze, swish, stride, dilation in _MOBILENET_V3:
            layers.append(
                InvertedResidual(
                    inputs,
                    kernel,
                    expanded,
                    outputs,
                    squeeze=squeeze,
                    act=nn.Hardswish if swish else nn.ReLU,
                    stride=stride,
                    dilation=dilation,
                )
            )
            inputs = outputs
        layers.append(Unit(inputs, 960, act=nn.Hardswish))
        self.low, self.high = (
            nn.Sequential(*layers[:_LOW_LEVEL]),
            nn.Sequential(*layers[_LOW_LEVEL:]),
        )
        self.maps = Unit(960, 128)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(960, 128, 1, bias=False))
        self.low_scores = nn.Conv2d(40, num_classes, 1)
        self.high_scores = nn.Conv2d(128, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of each pixel."""
        low = self.low(images)
        high = self.high(low)
        gated = self.maps(high) * torch.sigmoid(self.gate(high))
        large = F.interpolate(gated, low.shape[-2:], mode="bilinear", align_corners=False)
        scores = self.low_scores(low) + self.high_scores(large)
        return F.interpolate(scores, images.shape[-2:], mode="bilinear", align_corners=False)


class Attention(nn.Module):
    """Heads of scaled dot products."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, memory_BTD: Tensor) -> Tensor:
        """What each token of x takes from the memory."""
        q, k, v = (
            layer(source).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for layer, source in (
                (self.query, x_BTD),
                (self.key, memory_BTD),
                (self.value, memory_BTD),
            )
        )
        weights = torch.softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, -1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    """Attention to itself, to a memory if it has one, and a perceptron; norms before or after."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        inner: int,
        *,
        cross: bool,
        norm_first: bool,
        act: Activation,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        attentions = [Attention(width, num_heads) for _ in range(2 if cross else 1)]
        self.attentions = nn.ModuleList(attentions)
        self.perceptron = nn.Sequential(nn.Linear(width, inner), act(), nn.Linear(inner, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(len(attentions) + 1))

    def forward(self, x_BTD: Tensor, memory_BTD: Tensor | None = None) -> Tensor:
        """Tokens of the same shape."""
        for index, norm in enumerate(self.norms):
            y_BTD = norm(x_BTD) if self.norm_first else x_BTD
            if index == len(self.attentions):
                y_BTD = self.perceptron(y_BTD)
            else:
                y_BTD = self.attentions[index](y_BTD, memory_BTD if index else y_BTD)
            x_BTD = x_BTD + y_BTD if self.norm_first else norm(x_BTD + y_BTD)
        return x_BTD


class Transformer(nn.Module):
    """Encoder and decoder of six layers each, without the embeddings."""

    def __init__(self, width: int = 512, num_heads: int = 8, inner: int = 2048) -> None:
        super().__init__()

        def layers(*, cross: bool) -> nn.ModuleList:
            shape = {"norm_first": False, "act": nn.ReLU, "cross": cross}
            return nn.ModuleList(
                TransformerLayer(width, num_heads, inner, **shape) for _ in range(6)
            )

        self.encoder, self.decoder = layers(cross=False), layers(cross=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, source_BTD: Tensor, target_BTD: Tensor) -> Tensor:
        """Features of the target's tokens."""
        for layer in self.encoder:
            source_BTD = layer(source_BTD)
        memory_BTD = self.norms[0](source_BTD)
        for layer in self.decoder:
            target_BTD = layer(target_BTD, memory_BTD)
        return self.norms[1](target_BTD)


class VisionTransformer(nn.Module):
    """ViT-B/16."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 197, width))
        shape = {"cross": False, "norm_first": True, "act": nn.GELU}
        self.layers = nn.Sequential(
            *(TransformerLayer(width, 12, 4 * width, **shape) for _ in range(12))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        x_BTD = self.patches(images).flatten(2).transpose(1, 2)
        x_BTD = torch.cat([self.token, x_BTD], 1) + self.positions
        return self.head(self.norm(self.layers(x_BTD))[:, 0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """A network with the shapes of what it is called with."""

    title: str
    model: Callable[[], nn.Module]
    inputs: tuple[tuple[int, ...], ...] = ((1, 3, 224, 224),)


_VIDEO = ((1, 3, 16, 224, 224),)
NETWORKS: dict[str, Network] = {
    "resnet-50": Network(title="ResNet-50", model=lambda: Pooled(resnet_features(), 2048, 1000)),
    "densenet-121": Network(title="DenseNet-121", model=densenet),
    "resnext-50": Network(
        title="ResNeXt-50 32x4d",
        model=lambda: Pooled(resnet_features(groups=32, width=4), 2048, 1000),
    ),
    "r2plus1d-18": Network(title="R(2+1)D-18", model=r2plus1d, inputs=_VIDEO),
    "s3d": Network(title="S3D", model=s3d, inputs=_VIDEO),
    "fcn": Network(title="FCN, ResNet-50", model=fcn),
    "lraspp": Network(title="L-RASPP, MobileNetV3", model=LiteSegmenter),
    "deeplabv3": Network(title="DeepLabV3, ResNet-50", model=deeplab),
    "transformer": Network(
        title="Transformer base, 128 tokens", model=Transformer, inputs=((1, 128, 512),) * 2
    ),
    "vit-b-16": Network(title="ViT-B/16", model=VisionTransformer),
}
