"""The planner's parts: time and memory of layouts as columns of numbers. No torch."""
