"""Triton kernels run interpreted, on CPU tensors. `TRITON_INTERPRET=0` leaves their tests out."""

import importlib.util
import inspect
import os

# Before anything imports Triton, whose own functions are interpreted or compiled from then on.
os.environ.setdefault("TRITON_INTERPRET", "1")


def _quicken_interpreter() -> None:
    """Every call of a device function, `tl.sum` and `tl.zeros` among them, looks through all of `triton.language` for
    functions to replace: 2 ms, ten times the rest of the call. Inside a running kernel they are replaced already."""
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang

    def replace_once(fn):
        modules = [m for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)]
        if modules and not any(tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return replace(fn)

    interpreter._patch_lang = replace_once


if os.environ["TRITON_INTERPRET"] != "0" and importlib.util.find_spec("triton"):
    _quicken_interpreter()
