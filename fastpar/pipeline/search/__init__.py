"""Search: schedules made for given costs, and where the passes of a split head fit into one. No torch."""
