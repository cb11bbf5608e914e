"""Rational activations by group of channels.

Files, in the order in which to read them: `_rational.py` is the function and checks its operands,
`_operator.py` the operators with their gradients, `_torch.py` the formula and the way without
kernels, `rational.cpp` and `_native.py` the CPU's, `_kernels.py` and `_launch.py` the GPU's,
`_module.py` the module and `_fit.py` its first coefficients.
"""

from penstock.ops.rational._module import GroupRational
from penstock.ops.rational._rational import group_rational

__all__ = ["GroupRational", "group_rational"]
