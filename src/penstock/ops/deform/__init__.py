"""Deformable convolutions that gather and multiply at once, without a column buffer."""

from penstock.ops.deform._deform import deform_conv2d

__all__ = ["deform_conv2d"]
