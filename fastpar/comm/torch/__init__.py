"""Collectives and messages by the backends of torch.distributed: gloo and NCCL."""
