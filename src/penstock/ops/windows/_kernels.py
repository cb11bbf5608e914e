"""Triton kernels of windows and position-dependent filters; importing this imports Triton.

    unfold_rows           strips of windows, of one row of the output
    sum_windows           each element of images from its places in windows
    multiply              y_boij = sum_cfk weight_ocfkij x_bc(i,f)(j,k)
    differentiate_input   dx, each element from the places that it has in windows
    differentiate_weight  dweight_ocfkij = sum_b dy_boij x_bc(i,f)(j,k)

Each result has one writer and a fixed order, without atomics. Geometry, sizes and operands are the
tuples of `_launch.py`; rows of planes follow each other. Programs find their place in 32 bits, as a
division of 64 bits is a call, and their addresses in 64.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_row(i, f, height, g):
    """Return the row of images that row f of windows in row i is, and whether it is one."""
    row = i * g.stride_height + f * g.dilation_height - g.padding_height
    return row, (row >= 0) & (row < height)


@triton.jit
def find_columns(j, k, width, g):
    """Return the same of columns."""
    column = j * g.stride_width + k * g.dilation_width - g.padding_width
    return column, (column >= 0) & (column < width)


@triton.jit
def find_window_row(row, f, out_height, g):
    """Return the row of windows whose row f is a row of images, and whether there is one."""
    shifted = row + g.padding_height - f * g.dilation_height
    i = shifted // g.stride_height
    return i, (shifted >= 0) & (shifted % g.stride_height == 0) & (i < out_height)


@triton.jit
def find_window_columns(column, k, out_width, g):
    """Return the same of columns."""
    shifted = column + g.padding_width - k * g.dilation_width
    j = shifted // g.stride_width
    return j, (shifted >= 0) & (shifted % g.stride_width == 0) & (j < out_width)


@triton.jit
def unfold_rows(x, strips, size, span, g, sizes):
    """Write a part of a strip."""
    strip = tl.program_id(0)
    column = tl.program_id(1) * sizes.columns + tl.arange(0, sizes.columns)
    plane, i = (strip // size.out_height).to(tl.int64), strip % size.out_height
    from_column = column - g.padding_width
    is_inside = (column < span) & (from_column >= 0) & (from_column < size.width)
    for f in tl.static_range(g.kernel_height):
        row, is_row = find_row(i, f, size.height, g)
        pointers = x + (plane * size.height + row) * size.width + from_column
        values = tl.load(pointers, mask=is_inside & is_row, other=0.0)
        to = strips + (strip.to(tl.int64) * span + column) * g.kernel_height + f
        tl.store(to, values, mask=column < span)


@triton.jit
def sum_windows(windows, dx, strides, size, channels, g, sizes):
    """Sum the windows' elements that are a part of a row of images."""
    line = tl.program_id(0)
    column = tl.program_id(1) * sizes.columns + tl.arange(0, sizes.columns)
    plane, row = line // size.height, line % size.height
    sample, channel = (plane // channels).to(tl.int64), (plane % channels).to(tl.int64)
    start = windows + sample * strides.sample + channel * strides.channel
    sums = tl.zeros([sizes.columns], sizes.dtype)
    for f in tl.static_range(g.kernel_height):
        i, is_row = find_window_row(row, f, size.out_height, g)
        for k in tl.static_range(g.kernel_width):
            j, is_column = find_window_columns(column, k, size.out_width, g)
            at = i.to(tl.int64) * strides.row + j.to(tl.int64) * strides.column
            pointers = start + at + f * strides.kernel_row + k * strides.kernel_column
            mask = is_row & is_column & (column < size.width)
            sums += tl.load(pointers, mask=mask, other=0.0).to(sizes.dtype)
    to = dx + line.to(tl.int64) * size.width + column
    tl.store(to, sums.to(dx.dtype.element_ty), mask=column < size.width)


@triton.jit
def find_samples(batch, sizes):
    """Return the samples of a program, and which are there."""
    sample = tl.program_id(2) * sizes.samples + tl.arange(0, sizes.samples)
    return sample.to(tl.int64), sample < batch


@triton.jit
def multiply(x, weight, y, size, of, g, sizes):
    """Compute a part of a row of one output channel, for several samples."""
    number = tl.program_id(0)
    i, number = number % size.out_height, number // size.out_height
    o, instance = (number % of.outs).to(tl.int64), (number // of.outs).to(tl.int64)
    j = tl.program_id(1) * sizes.columns + tl.arange(0, sizes.columns)
    sample, is_sample = find_samples(of.batch, sizes)
    weights = weight + instance * of.weight.instance + o * of.weight.out
    weights += i.to(tl.int64) * of.weight.line + j
    images = x + instance * of.x.instance + sample[:, None] * of.x.sample
    sums = tl.zeros([sizes.samples, sizes.columns], sizes.dtype)
    for c in range(of.channels):
        for f in tl.static_range(g.kernel_height):
            row, is_row = find_row(i, f, size.height, g)
            line = images + c * of.x.channel + row * size.width
            for k in tl.static_range(g.kernel_width):
                column, is_column = find_columns(j, k, size.width, g)
                at = c * of.weight.channel + f * of.weight.row + k * of.weight.column
                factor = tl.load(weights + at, mask=j < size.out_width, other=0.0)
                mask = is_sample[:, None] & (is_row & is_column & (j < size.out_width))[None, :]
                value = tl.load(line + column[None, :], mask=mask, other=0.0)
                sums += factor.to(sizes.dtype)[None, :] * value.to(sizes.dtype)
    to = y + instance * of.y.instance + sample[:, None] * of.y.sample + o * of.y.channel
    to += i * size.out_width + j[None, :]
    mask = is_sample[:, None] & (j < size.out_width)[None, :]
    tl.store(to, sums.to(y.dtype.element_ty), mask=mask)


@triton.jit
def differentiate_input(dy, weight, dx, size, of, g, sizes):
    """Compute a part of a row of one input channel, for several samples."""
    number = tl.program_id(0)
    row, number = number % size.height, number // size.height
    c, instance = (number % of.channels).to(tl.int64), (number // of.channels).to(tl.int64)
    column = tl.program_id(1) * sizes.columns + tl.arange(0, sizes.columns)
    sample, is_sample = find_samples(of.batch, sizes)
    weights = weight + instance * of.weight.instance + c * of.weight.channel
    images = dy + instance * of.y.instance + sample[:, None] * of.y.sample
    sums = tl.zeros([sizes.samples, sizes.columns], sizes.dtype)
    for f in tl.static_range(g.kernel_height):
        i, is_row = find_window_row(row, f, size.out_height, g)
        for k in tl.static_range(g.kernel_width):
            j, is_column = find_window_columns(column, k, size.out_width, g)
            is_place = is_row & is_column & (column < size.width)
            at = f * of.weight.row + k * of.weight.column + i.to(tl.int64) * of.weight.line + j
            line = images + i * size.out_width + j[None, :]
            mask = is_sample[:, None] & is_place[None, :]
            for number_of_out in range(of.outs):
                o = instance * 0 + number_of_out  # of 64 bits
                factor = tl.load(weights + at + o * of.weight.out, mask=is_place, other=0.0)
                value = tl.load(line + o * of.y.channel, mask=mask, other=0.0)
                sums += factor.to(sizes.dtype)[None, :] * value.to(sizes.dtype)
    to = dx + instance * of.x.instance + sample[:, None] * of.x.sample + c * of.x.channel
    to += row * size.width + column[None, :]
    mask = is_sample[:, None] & (column < size.width)[None, :]
    tl.store(to, sums.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def differentiate_weight(dy, x, dweight, size, of, g, sizes):
    """Compute the weights' gradient at a part of a row of positions, for two channels."""
    number = tl.program_id(0)
    i, number = number % size.out_height, number // size.out_height
    c, number = (number % of.channels).to(tl.int64), number // of.channels
    o, instance = (number % of.outs).to(tl.int64), (number // of.outs).to(tl.int64)
    j = tl.program_id(1) * sizes.columns + tl.arange(0, sizes.columns)
    outs = dy + instance * of.y.instance + o * of.y.channel + i * size.out_width + j[None, :]
    images = x + instance * of.x.instance + c * of.x.channel
    weights = dweight + instance * of.weight.instance + o * of.weight.out + c * of.weight.channel
    for f in tl.static_range(g.kernel_height):
        row, is_row = find_row(i, f, size.height, g)
        for k in tl.static_range(g.kernel_width):
            column, is_column = find_columns(j, k, size.width, g)
            sums = tl.zeros([sizes.samples, sizes.columns], sizes.dtype)
            for first in range(0, of.batch, sizes.samples):
                sample = (first + tl.arange(0, sizes.samples)).to(tl.int64)[:, None]
                mask = (sample < of.batch) & (j < size.out_width)[None, :]
                of_y = tl.load(outs + sample * of.y.sample, mask=mask, other=0.0)
                line = images + sample * of.x.sample + row * size.width + column[None, :]
                value = tl.load(line, mask=mask & (is_row & is_column)[None, :], other=0.0)
                sums += of_y.to(sizes.dtype) * value.to(sizes.dtype)
            at = f * of.weight.row + k * of.weight.column + i.to(tl.int64) * of.weight.line + j
            found = tl.sum(sums, 0).to(dweight.dtype.element_ty)
            tl.store(weights + at, found, mask=j < size.out_width)
