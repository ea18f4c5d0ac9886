"""Triton kernels. They import torch and triton only, and install as `fastpar.kernels`."""
