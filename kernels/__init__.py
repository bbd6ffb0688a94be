"""Triton kernels and their launchers, installed as `bertfast.kernels`.

Dimensions, everywhere in this package: B batch, S sequence, H heads, D head dim, M = B*S rows, N hidden width,
F feed-forward width, T tokens after unpadding.

`kernels` is also the name of a Hugging Face package that transformers looks for. With the repository's root on
`sys.path` that name finds this folder, so under that name this file hands over to the real package, and stays an empty
module where there is none. It never raises: an error here would break `from transformers import BertModel`.
"""


def _hand_over() -> None:
    import os
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    ours = sys.modules[__name__]
    try:
        root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
        spec = PathFinder.find_spec(__name__, [entry for entry in sys.path if os.path.realpath(entry) != root])
        # A mere folder of that name (a namespace package) has no origin and is not the package.
        if spec is not None and spec.loader is not None and spec.origin is not None:
            theirs = module_from_spec(spec)
            sys.modules[__name__] = theirs
            spec.loader.exec_module(theirs)
    except Exception:
        sys.modules[__name__] = ours


if __name__ == "kernels":
    _hand_over()
