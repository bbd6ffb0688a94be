"""Names of tensors: from what a file calls them to what a model calls them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_WRAPPERS = ("module.", "_orig_mod.")
_LEGACY = {"gamma": "weight", "beta": "bias"}


def canonical(name: str) -> str:
    """A file's name without what DataParallel and `torch.compile` put before it, and with LayerNorm's present names."""
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    name = name.replace("._orig_mod.", ".")
    return re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda match: _LEGACY[match[0]], name)


def match_names(
    file_names: Iterable[str], model_names: Iterable[str], prefix: str
) -> tuple[dict[str, str], list[str], list[str]]:
    """Finds which tensor of a file goes where.

    Args:
        file_names: names in the file.
        model_names: names in the model's state dict.
        prefix: `base_model_prefix` of the model, which either side may have and the other not.

    Returns:
        Model name -> file name; the (canonical) names that the model has no place for; and the file's names that say
        the same as one before them.
    """
    places = set(model_names)
    matched: dict[str, str] = {}
    unexpected: dict[str, None] = {}
    duplicates: list[str] = []
    # A tensor that already has its present name wins over one that needs renaming.
    renamed = {file_name: canonical(file_name) for file_name in file_names}
    for file_name, name in sorted(renamed.items(), key=lambda pair: (pair[0] != pair[1], pair[0])):
        bare = name.removeprefix(f"{prefix}.")
        place = next((n for n in (bare, f"{prefix}.{name}", name) if n in places), None)
        if place is None:
            unexpected[name] = None
        elif place in matched:
            duplicates.append(file_name)
        else:
            matched[place] = file_name
    return matched, list(unexpected), duplicates


def is_stray_buffer(name: str) -> bool:
    """Whether a tensor is a buffer that older versions of transformers saved and every model makes by itself."""
    return name.rpartition(".")[2] in ("position_ids", "token_type_ids")


def is_silent(name: str) -> bool:
    """Whether transformers leaves an unexpected tensor out of its report."""
    return name.rpartition(".")[2] == "position_ids"
