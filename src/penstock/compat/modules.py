"""Private names of torch's modules."""

from torch.nn.modules.module import _has_any_global_hook

has_global_hooks = _has_any_global_hook
"""Return whether hooks are registered that torch calls for all modules."""
