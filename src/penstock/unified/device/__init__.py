"""Tables as GPUs see them."""
