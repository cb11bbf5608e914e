"""Windows of images, and filters that depend on the position.

Files, in the order in which to read them: `_geometry.py` has the places of windows, `_unfold.py`
and `_local.py` the functions and their operators, `_filters.py` the sizes and strides of a call,
`_torch.py` the way without kernels, `windows.cpp`, `local.cpp` and `_native.py` the CPU's,
`_kernels.py` and `_launch.py` the GPU's, `_module.py` the layer.
"""

from penstock.ops.windows._local import dynamic_filter2d, local_conv2d
from penstock.ops.windows._module import LocalConv2d
from penstock.ops.windows._unfold import unfold_windows

__all__ = ["LocalConv2d", "dynamic_filter2d", "local_conv2d", "unfold_windows"]
