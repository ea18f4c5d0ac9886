"""Tests of Triton kernels in Triton's interpreter (see tests/triton_interpreter.py), which is spared its dearest work.

At each call of a jitted function, those inside a kernel too, it looks through all of triton.language for what it
replaces, which took a third of the time of these tests. Within a launch, once for each set of modules is enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter

_patch_lang: Callable[[Any], Any] = interpreter._patch_lang
_patched: set[frozenset[str]] = set()  # sets of modules, within the launch of a kernel


@functools.cache
def _modules(fn: Any) -> frozenset[str]:
    lang = interpreter.tl
    return frozenset(value.__name__ for value in fn.__globals__.values() if value is lang or value is lang.core)


def _patch_lang_once(fn: Any) -> Any:
    modules = _modules(fn)
    if modules in _patched:
        return interpreter._LangPatchScope()  # nothing to restore
    scope = _patch_lang(fn)
    restore = scope.restore

    def restore_all() -> None:
        _patched.clear()
        restore()

    scope.restore = restore_all
    _patched.add(modules)
    return scope


if hasattr(interpreter, "_LangPatchScope"):  # where it restores what it has replaced
    interpreter._patch_lang = _patch_lang_once
