"""Doors into other libraries: torch's `parallelize_module` and Hugging Face's registries. Import the one you need."""
