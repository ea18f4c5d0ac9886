"""Doors into other libraries: torch's `parallelize_module`, Hugging Face's registries, Trainer and accelerate, fused
modules in a model that exists. Import the one you need."""
