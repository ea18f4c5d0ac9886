"""What runs a schedule: `Pipeline`, the batch, messages between stages, and the loss of a split head."""
