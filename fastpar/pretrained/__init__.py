"""Models as folders of safetensors files, written from shards and read by slices.

    save_pretrained(model, folder)      ordinary files of whole tensors, one after the other: no rank has all of them

`fastpar.load_pretrained` (`fastpar.parallel.load`) is the way back.
"""

from fastpar.pretrained.saving import save_pretrained

__all__ = ["save_pretrained"]
