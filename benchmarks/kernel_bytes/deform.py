"""Bytes that the kernels ask of memory, as formulas of shapes and of the corners inside images.

With E bytes of an element, B images of P pixels of output and H of input, C channels, O outputs in
tiles of groups of weights (o of them), T taps, G offset groups, and Q corners inside, of all images
and offset groups; a place takes p = 8 bytes, 12 with a mask, and its corners C / G E each:

    convolve_tiles         B P T p (groups o segments) + o Q C / G E
                           + B ceil(P / tile) E (weights, and O of the bias); B P O E stored
    differentiate_weights  B P T p (groups o tiles of channels) + o Q C / G E
                           + B P O T E (tiles of channels); 4 parts x weights stored
    differentiate_places   B P T G p + B P T C E + Q C / G E; B P T G p stored
    gather_gradients       8 Q (tiles of channels) + Q C / G E; of each window 8 G H (tiles) and
                           4 C H, which are stored too
    gather_halo            instead: B N G p (tiles of channels) + Q C / G E, without corners that
                           have a factor of 0; of each window the rows that are reached of 4 C H,
                           which are stored too

N are the pairs of a pixel and a place that an offset may take there, of all taps. Bytes are
requests, before any cache.
"""

from __future__ import annotations

import dataclasses

from penstock._lazy import cached_property
from penstock.codegen import ByteCount
from penstock.ops.deform._shapes import DeformInputs
from penstock.ops.deform.triton._launch import (
    DeformOperands,
    DeformSizes,
    find_reached,
    sizes_of,
    sort_corners,
)

_WORD = 4  # bytes of a float32 and of an int32


@dataclasses.dataclass(frozen=True, eq=False)
class DeformBytes:
    """Bytes of the kernels of a call; the offsets are read.

    Attributes:
        given: Operands; offsets and mask are float32.
        num_windows: Windows of an image's pixels in the backward pass.
    """

    given: DeformInputs
    num_windows: int = 1

    def forward(self) -> ByteCount:
        """Return the bytes of `forward`."""
        s, pixels, element = self._sizes, self._pixels, self.given.x.element_size()
        programs = self._groups * self._out_tiles
        tiles = len(self.given.x) * -(-pixels // s.tile_pixels)
        loaded = len(self.given.x) * pixels * s.taps * self._place_bytes * programs * s.segments
        loaded += self._out_tiles * self._corner_bytes
        loaded += tiles * element * (self.given.weight.numel() + s.outs * s.has_bias)
        return ByteCount(
            loaded_bytes=loaded, stored_bytes=len(self.given.x) * s.outs * pixels * element
        )

    def backward(self) -> ByteCount:
        """Return the bytes of all kernels of `backward`."""
        windows = self.num_windows * len(self.given.x)
        return ByteCount(
            loaded_bytes=self._load_weights() + self._load_places() + self._load_gradients(windows),
            stored_bytes=_WORD * self._sizes.parts * self.given.weight.numel()
            + self._all_places * self._place_bytes
            + self._reached_bytes,
            num_launches=1 + 2 * windows,
        )

    def _load_weights(self) -> int:
        s, element = self._sizes, self.given.x.element_size()
        channel_tiles = s.segments * -(-s.segment // s.tile_channels)
        pixels = len(self.given.x) * self._pixels * s.taps * channel_tiles
        places = pixels * self._place_bytes * self._groups * self._out_tiles
        return places + self._out_tiles * self._corner_bytes + pixels * s.outs * element

    def _load_places(self) -> int:
        s = self._sizes
        columns = (
            len(self.given.x) * self._pixels * s.taps * s.channels * self.given.x.element_size()
        )
        return self._all_places * self._place_bytes + columns + self._corner_bytes

    def _load_gradients(self, windows: int) -> int:
        s = self._sizes
        tiles = -(-s.of_offset // s.tile_channels)
        if s.halo_height > 0:
            places = len(self.given.x) * self._halo_pairs * s.offset_groups * self._place_bytes
            return places * tiles + self._corner_bytes + self._reached_bytes
        lists = 2 * _WORD * s.offset_groups * s.height * s.width * tiles
        entries = 2 * _WORD * self._corners * tiles
        return entries + self._corner_bytes + windows * lists + self._reached_bytes

    @cached_property
    def _sizes(self) -> DeformSizes:
        return sizes_of(self.given)

    @cached_property
    def _corners(self) -> int:
        """Corners inside of the images, of all places."""
        operands = DeformOperands(
            self.given.x,
            self.given.offset,
            self.given.offset if self.given.mask is None else self.given.mask,
        )
        windows = [(image, 0, self._pixels) for image in range(len(self.given.x))]
        return sum(int(sort_corners(operands, self._sizes, each)[0][-1]) for each in windows)

    @property
    def _pixels(self) -> int:
        return self._sizes.out_height * self._sizes.out_width

    @property
    def _groups(self) -> int:
        return self._sizes.channels // self._sizes.of_group

    @property
    def _out_tiles(self) -> int:
        return -(-self._sizes.outs_of_group // self._sizes.tile_outs)

    @property
    def _place_bytes(self) -> int:
        return _WORD * (2 + self._sizes.has_mask)

    @property
    def _all_places(self) -> int:
        return len(self.given.x) * self._pixels * self._sizes.taps * self._sizes.offset_groups

    @property
    def _corner_bytes(self) -> int:
        return self._corners * self._sizes.of_offset * self.given.x.element_size()

    @property
    def _halo_pairs(self) -> int:
        """Pairs of a pixel of the input and a place, of a tap, in whose reach it is."""
        s, total = self._sizes, 1
        of_geometry = (
            self.given.geometry.stride,
            self.given.geometry.padding,
            self.given.geometry.dilation,
        )
        for axis in range(2):
            stride, padding, dilation = (each[axis] for each in of_geometry)
            total *= sum(
                abs(out * stride - padding + tap * dilation - at) <= s.reach
                for out in range((s.out_height, s.out_width)[axis])
                for tap in range(self.given.weight.shape[2 + axis])
                for at in range(self.given.x.shape[2 + axis])
            )
        return total

    @property
    def _reached_bytes(self) -> int:
        """Bytes of the input's gradient that windows add to."""
        s = self._sizes
        pixels = [s.height * s.width] * self.num_windows
        if s.halo_height > 0:
            step = -(-self._pixels // self.num_windows)
            windows = [(0, at, min(at + step, self._pixels)) for at in range(0, self._pixels, step)]
            pixels = [stop - start for start, stop in (find_reached(s, each) for each in windows)]
        return len(self.given.x) * _WORD * s.channels * sum(pixels)
