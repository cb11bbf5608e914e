"""Triton kernels of deformable convolutions; importing this imports Triton.

    convolve_tiles        y = b + W columns, where columns are sampled as they are multiplied
    differentiate_places  dm = sum_c dcolumn x(p), dp = m sum_c dcolumn dx(p) / dp
    differentiate_weights dW = dout columns'
    gather_gradients      dx_q = sum of the columns' gradients whose corner is q, by their list
    gather_halo           the same where offsets have a bound, from all places that may reach q

Channels are taken in segments that share a weight group and an offset group. Each sum has one
writer and a fixed order, without atomics. Tuples and sizes are those of `_launch.py`.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_place(call, image, group, tap, pixel, is_pixel, s):
    """Return y and x of a tap at pixels of the output, and its factor."""
    num_pixels = s.out_height * s.out_width
    row = (image * s.offset_groups + group) * s.taps + tap
    at = call.offset + 2 * row.to(tl.int64) * num_pixels + pixel
    tap_y = tap // s.kernel_width
    tap_x = tap - tap_y * s.kernel_width
    top = pixel // s.out_width * s.stride_y - s.padding_y + tap_y * s.dilation_y
    left = pixel % s.out_width * s.stride_x - s.padding_x + tap_x * s.dilation_x
    y = top.to(tl.float32) + tl.load(at, mask=is_pixel, other=0.0)
    x = left.to(tl.float32) + tl.load(at + num_pixels, mask=is_pixel, other=0.0)
    factor = tl.full(y.shape, 1.0, tl.float32)
    if s.has_mask:
        factor = tl.load(
            call.mask + row.to(tl.int64) * num_pixels + pixel, mask=is_pixel, other=0.0
        )
    return y, x, factor


@triton.jit
def find_corner(y, x, s):
    """Return the first corner of places, and how far they are from it: 0 if far away."""
    is_near = (y > -2) & (y < s.height + 1) & (x > -2) & (x < s.width + 1)
    rest = tl.where((y == y) & (x == x), 0.0, float("nan"))
    near_y, near_x = tl.where(is_near, y, -2.0), tl.where(is_near, x, -2.0)
    top, left = tl.floor(near_y), tl.floor(near_x)
    down = tl.where(is_near, near_y - top, rest)
    right = tl.where(is_near, near_x - left, rest)
    return top.to(tl.int32), left.to(tl.int32), down, right


@triton.jit
def load_corner(call, image, channel, row, column, is_pixel, is_channel, s):
    """Load a corner of places, `(pixels, channels)`, with zeros beyond the image."""
    is_inside = is_pixel & (row >= 0) & (row < s.height) & (column >= 0) & (column < s.width)
    plane = (image * s.channels + channel).to(tl.int64) * (s.height * s.width)
    pointers = call.x + plane[None, :] + (row * s.width + column)[:, None]
    mask = is_inside[:, None] & is_channel[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_corners(call, image, channel, top, left, is_pixel, is_channel, s):
    """Load the four corners of places."""
    x0 = load_corner(call, image, channel, top, left, is_pixel, is_channel, s)
    x1 = load_corner(call, image, channel, top, left + 1, is_pixel, is_channel, s)
    x2 = load_corner(call, image, channel, top + 1, left, is_pixel, is_channel, s)
    x3 = load_corner(call, image, channel, top + 1, left + 1, is_pixel, is_channel, s)
    return x0, x1, x2, x3


@triton.jit
def sample(call, image, channel, corner, factor, is_pixel, is_channel, s):
    """Return columns of places, `(pixels, channels)`."""
    top, left, down, right = corner
    x0, x1, x2, x3 = load_corners(call, image, channel, top, left, is_pixel, is_channel, s)
    upper = x0 * (1 - right)[:, None] + x1 * right[:, None]
    lower = x2 * (1 - right)[:, None] + x3 * right[:, None]
    value = upper * (1 - down)[:, None] + lower * down[:, None]
    return value * factor[:, None]


@triton.jit
def convolve_tiles(call, weight, bias, out, s):
    """Compute a tile of pixels and outputs of an image and a group of weights."""
    num_pixels = s.out_height * s.out_width
    first = tl.program_id(0) * s.tile_pixels
    out_tiles = tl.cdiv(s.outs_of_group, s.tile_outs)
    weight_group = tl.program_id(1) // out_tiles
    image = tl.program_id(2)
    pixel = first + tl.arange(0, s.tile_pixels)
    of_group = tl.program_id(1) % out_tiles * s.tile_outs + tl.arange(0, s.tile_outs)
    is_pixel, is_out = pixel < num_pixels, of_group < s.outs_of_group
    o = weight_group * s.outs_of_group + of_group
    sums = tl.zeros([s.tile_pixels, s.tile_outs], tl.float32)
    for segment in range(s.segments):
        start = segment * s.segment
        offset_group = (weight_group * s.of_group + start) // s.of_offset
        for tap in range(s.taps):
            y, x, factor = find_place(call, image, offset_group, tap, pixel, is_pixel, s)
            corner = find_corner(y, x, s)
            for c in range(0, s.segment, s.tile_channels):
                channel = c + tl.arange(0, s.tile_channels)
                is_channel = channel < s.segment
                columns = sample(
                    call,
                    image,
                    weight_group * s.of_group + start + channel,
                    corner,
                    factor,
                    is_pixel,
                    is_channel,
                    s,
                )
                place = (o[None, :] * s.of_group + start + channel[:, None]) * s.taps + tap
                mask = is_channel[:, None] & is_out[None, :]
                weights = tl.load(weight + place, mask=mask, other=0.0)
                sums = tl.dot(columns.to(weights.dtype), weights, sums, input_precision=s.precision)
    if s.has_bias:
        sums += tl.load(bias + o, mask=is_out, other=0.0).to(tl.float32)[None, :]
    plane = (image * s.outs + o).to(tl.int64) * num_pixels
    mask = is_pixel[:, None] & is_out[None, :]
    tl.store(out + plane[None, :] + pixel[:, None], sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["image", "first", "end"])
def differentiate_places(call, dcolumns, doffset, dmask, image, first, end, s):
    """Compute the gradients of a tap's places of a tile of pixels, from the columns' `(pixels,
    groups of weights, taps, channels)` of the pixels [first, end) of an image.
    """
    num_pixels = s.out_height * s.out_width
    pixel = first + tl.program_id(0) * s.tile_pixels + tl.arange(0, s.tile_pixels)
    tap, group = tl.program_id(1), tl.program_id(2)
    is_pixel = pixel < end
    y, x, factor = find_place(call, image, group, tap, pixel, is_pixel, s)
    top, left, down, right = find_corner(y, x, s)
    dy = tl.zeros([s.tile_pixels], tl.float32)
    dx = tl.zeros([s.tile_pixels], tl.float32)
    dm = tl.zeros([s.tile_pixels], tl.float32)
    for c in range(0, s.of_offset, s.tile_channels):
        channel = c + tl.arange(0, s.tile_channels)
        is_channel = channel < s.of_offset
        channel = group * s.of_offset + channel
        mask = is_pixel[:, None] & is_channel[None, :]
        at = place_column((pixel - first)[:, None], tap, channel[None, :], s)
        given = tl.load(dcolumns + at, mask=mask, other=0.0).to(tl.float32)
        x0, x1, x2, x3 = load_corners(call, image, channel, top, left, is_pixel, is_channel, s)
        across0, across1 = x1 - x0, x3 - x2
        upper, lower = x0 + right[:, None] * across0, x2 + right[:, None] * across1
        dm += tl.sum(given * (upper * (1 - down)[:, None] + lower * down[:, None]), 1)
        dy += tl.sum(given * (lower - upper), 1)
        dx += tl.sum(given * (across0 * (1 - down)[:, None] + across1 * down[:, None]), 1)
    row = ((image * s.offset_groups + group) * s.taps + tap).to(tl.int64)
    to = doffset + 2 * row * num_pixels + pixel
    # Far away, where all corners are 0, the sums are; where a place is NaN, so are they.
    rest = (down + right) * 0.0
    tl.store(to, factor * dy + rest, mask=is_pixel)
    tl.store(to + num_pixels, factor * dx + rest, mask=is_pixel)
    if s.has_mask:
        tl.store(dmask + row * num_pixels + pixel, dm, mask=is_pixel)


@triton.jit
def place_column(pixel, tap, channel, s):
    """Return where a column is in those of a window."""
    groups: tl.constexpr = s.channels // s.of_group
    group = channel // s.of_group
    row = (pixel * groups + group).to(tl.int64) * s.taps + tap
    return row * s.of_group + channel % s.of_group


@triton.jit
def differentiate_weights(call, dout, dweight, s):
    """Compute a tile of weights of one tap, from some images' pixels, which are a part."""
    num_pixels = s.out_height * s.out_width
    channel_tiles: tl.constexpr = (s.segment + s.tile_channels - 1) // s.tile_channels
    out_tiles = tl.cdiv(s.outs_of_group, s.tile_outs)
    weight_group = tl.program_id(0) // out_tiles
    of_group = tl.program_id(0) % out_tiles * s.tile_outs + tl.arange(0, s.tile_outs)
    is_out = of_group < s.outs_of_group
    o = weight_group * s.outs_of_group + of_group
    tap = tl.program_id(1) % s.taps
    of_segment = tl.program_id(1) // s.taps
    start = of_segment // channel_tiles * s.segment
    channel = of_segment % channel_tiles * s.tile_channels + tl.arange(0, s.tile_channels)
    is_channel = channel < s.segment
    channel += start
    offset_group = (weight_group * s.of_group + start) // s.of_offset
    part = tl.program_id(2)
    sums = tl.zeros([s.tile_outs, s.tile_channels], tl.float32)
    begin, end = part * s.batch // s.parts, (part + 1) * s.batch // s.parts
    for step in range(end - begin):
        image = begin + step
        for first in range(0, num_pixels, s.tile_pixels):
            pixel = first + tl.arange(0, s.tile_pixels)
            is_pixel = pixel < num_pixels
            y, x, factor = find_place(call, image, offset_group, tap, pixel, is_pixel, s)
            corner = find_corner(y, x, s)
            at = weight_group * s.of_group + channel
            columns = sample(call, image, at, corner, factor, is_pixel, is_channel, s)
            columns = tl.where(is_pixel[:, None], columns, 0.0)
            plane = (image * s.outs + o).to(tl.int64) * num_pixels
            mask = is_out[:, None] & is_pixel[None, :]
            douts = tl.load(dout + plane[:, None] + pixel[None, :], mask=mask, other=0.0)
            sums = tl.dot(douts, columns.to(douts.dtype), sums, input_precision=s.precision)
    place = ((part * s.outs + o[:, None]) * s.of_group + channel[None, :]) * s.taps + tap
    tl.store(dweight + place, sums, mask=is_out[:, None] & is_channel[None, :])


@triton.jit(do_not_specialize=["image"])
def gather_gradients(dcolumns, offsets, rows, factors, dx, image, s):
    """Add to a tile of the input's gradient the columns' of a window, by the list of each pixel."""
    plane = s.height * s.width
    pixel = tl.program_id(0) * s.tile_pixels + tl.arange(0, s.tile_pixels)
    group = tl.program_id(2)
    channel = tl.program_id(1) * s.tile_channels + tl.arange(0, s.tile_channels)
    is_pixel, is_channel = pixel < plane, channel < s.of_offset
    channel += group * s.of_offset
    list_of = group * plane + pixel
    begin = tl.load(offsets + list_of, mask=is_pixel, other=0)
    end = tl.load(offsets + list_of + 1, mask=is_pixel, other=0)
    sums = tl.zeros([s.tile_pixels, s.tile_channels], tl.float32)
    for step in range(tl.max(end - begin, 0)):
        place = begin + step
        is_there = is_pixel & (place < end)
        row = tl.load(rows + place, mask=is_there, other=0)
        factor = tl.load(factors + place, mask=is_there, other=0.0)
        at = place_column((row // s.taps)[:, None], (row % s.taps)[:, None], channel[None, :], s)
        mask = is_there[:, None] & is_channel[None, :]
        given = tl.load(dcolumns + at, mask=mask, other=0.0).to(tl.float32)
        sums += factor[:, None] * given
    to = dx + (image * s.channels + channel).to(tl.int64)[None, :] * plane + pixel[:, None]
    mask = is_pixel[:, None] & is_channel[None, :]
    tl.store(to, tl.load(to, mask=mask, other=0.0) + sums, mask=mask)


@triton.jit
def find_first(position, tap, stride: tl.constexpr, padding: tl.constexpr, dilation: tl.constexpr,
               reach: tl.constexpr):  # fmt: skip
    """Return the first output with a tap from which an offset may reach positions of the input."""
    least = position + padding - tap * dilation - reach
    return tl.cdiv(tl.maximum(least, 0), stride)


@triton.jit(do_not_specialize=["image", "first", "end", "start", "stop"])
def gather_halo(call, dcolumns, dx, image, first, end, start, stop, s):
    """Add to the input's pixels [start, stop) the columns' gradients of a window, from all outputs
    within the reach of offsets.
    """
    plane = s.height * s.width
    pixel = start + tl.program_id(0) * s.tile_pixels + tl.arange(0, s.tile_pixels)
    group = tl.program_id(2)
    channel = tl.program_id(1) * s.tile_channels + tl.arange(0, s.tile_channels)
    is_pixel, is_channel = pixel < stop, channel < s.of_offset
    channel += group * s.of_offset
    row, column = pixel // s.width, pixel % s.width
    sums = tl.zeros([s.tile_pixels, s.tile_channels], tl.float32)
    for tap in range(s.taps):
        tap_y = tap // s.kernel_width
        tap_x = tap - tap_y * s.kernel_width
        top = find_first(row, tap_y, s.stride_y, s.padding_y, s.dilation_y, s.reach)
        left = find_first(column, tap_x, s.stride_x, s.padding_x, s.dilation_x, s.reach)
        for down in range(s.halo_height):
            out_row = top + down
            below = out_row * s.stride_y - s.padding_y + tap_y * s.dilation_y - row
            is_row = is_pixel & (out_row < s.out_height) & (below <= s.reach)
            for right in range(s.halo_width):
                out_column = left + right
                beside = out_column * s.stride_x - s.padding_x + tap_x * s.dilation_x - column
                at = out_row * s.out_width + out_column
                is_there = is_row & (out_column < s.out_width) & (beside <= s.reach)
                is_there &= (at >= first) & (at < end)
                y, x, factor = find_place(call, image, group, tap, at, is_there, s)
                up, across = tl.abs(y - row), tl.abs(x - column)
                is_near = is_there & (up < 1) & (across < 1)  # of no NaN
                factor = tl.where(is_near, (1 - up) * (1 - across) * factor, 0.0)
                place = place_column((at - first)[:, None], tap, channel[None, :], s)
                mask = is_near[:, None] & is_channel[None, :]
                given = tl.load(dcolumns + place, mask=mask, other=0.0).to(tl.float32)
                sums += factor[:, None] * given
    to = dx + (image * s.channels + channel).to(tl.int64)[None, :] * plane + pixel[:, None]
    mask = is_pixel[:, None] & is_channel[None, :]
    tl.store(to, tl.load(to, mask=mask, other=0.0) + sums, mask=mask)
