"""Run Triton kernels on the CPU: import this before anything that imports triton."""

import os
import sys
from typing import Any

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError(
        "triton was imported before its interpreter was switched on; run these tests in a process "
        "of their own (tests/kernels/test_interpreted.py does)"
    )
os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch(tensor: Any, scope: Any) -> None:
    # triton 3.6 takes int() of an array of one number, which numpy 2.4 no longer gives
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch
_patch_lang = interpreter._patch_lang
_patched: set[int] = set()
"""The modules of Triton's language that the launch which is running has replaced functions in."""


def _patch_once(function: Any) -> Any:
    # triton does it again for every call of a function by a kernel: a third of the time
    language = (interpreter.tl, interpreter.tl.core)
    seen = {id(x) for x in function.__globals__.values() if any(x is each for each in language)}
    if seen and seen <= _patched:
        return interpreter._LangPatchScope()
    scope = _patch_lang(function)
    restore = scope.restore

    def restore_all() -> None:
        restore()
        _patched.clear()

    scope.restore = restore_all
    _patched.update(seen)
    return scope


interpreter._patch_lang = _patch_once
