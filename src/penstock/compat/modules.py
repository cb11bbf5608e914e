"""Private names of torch's modules."""

from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils import parametrize

has_global_hooks = _has_any_global_hook
"""Return whether hooks are registered that torch calls for all modules."""


def has_cached_weights(module: nn.Module) -> bool:
    """Return whether `torch.nn.utils.parametrize.cached` is on and keeps a module's weights."""
    return parametrize._cache_enabled > 0 and parametrize.is_parametrized(module)
