"""Collectives and messages of CPU ranks on several hosts: shared memory within a host, gloo between hosts."""
