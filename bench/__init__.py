"""Microbenchmarks: ``fastpar bench <name>``. The traps they avoid are listed in `bench.harness`."""
