"""Weight gradients deferred, for pipeline schedules with separate backward-input and backward-weight actions."""
