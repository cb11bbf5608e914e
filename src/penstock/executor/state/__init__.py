"""The user's state in a planned step: model, optimizer and batch, bound to the plan's memory."""
