"""Triton kernels run interpreted, on CPU tensors. `TRITON_INTERPRET=0` leaves their tests out."""

import importlib.util
import inspect
import os

# Before anything imports Triton, whose own functions are interpreted or compiled from then on.
os.environ.setdefault("TRITON_INTERPRET", "1")


def _mend_interpreter() -> None:
    """Every call of a device function, `tl.sum` and `tl.zeros` among them, looks through all of `triton.language` for
    functions to replace: 2 ms, ten times the rest of the call. Inside a running kernel most are replaced already. And
    what such a call replaces stays replaced when the kernel has ended, so that nothing can be compiled any more: here
    it ends with the kernel."""
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang
    running = interpreter._LangPatchScope()

    def replace_once(fn):
        nonlocal running
        if not running._changes:
            running = replace(fn)
            return running
        modules = [m for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)]
        if any(tl.core.is_builtin(module.load) for module in modules):
            running._changes.extend(replace(fn)._changes)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replace_once


if os.environ["TRITON_INTERPRET"] != "0" and importlib.util.find_spec("triton"):
    _mend_interpreter()
