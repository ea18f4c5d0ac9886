"""Schedules as data: their language (`schedule`), the published ones (`flush`, `zero_bubble`, ...), lowering, checks.
No torch."""
