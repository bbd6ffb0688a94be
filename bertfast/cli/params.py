"""`bertfast params`: where a model's parameters sit."""

from __future__ import annotations

from collections.abc import Iterator

import click

from bertfast.cli.console import json_option, output, print_json


@click.command()
@click.argument("name")
@click.option("--full", is_flag=True, help="List every layer, also where all are alike.")
@json_option
def params(name: str, full: bool, as_json: bool) -> None:
    """List a model's components: shape, count, share.

    NAME is a preset (bert-base, bert-large, distilbert-base, roberta-base, roberta-large), a checkpoint's folder or a
    hub id. Weights are neither read nor allocated. A parameter that is tied to another is counted once.
    """
    table = parameter_table(name)
    if as_json:
        print_json(table)
    else:
        _print(table, full)


def parameter_table(name: str) -> dict:
    """The model's total, and its sections with their sums, parameters and inner sections; a tied copy counts 0."""
    model = _build(name)
    total = sum(p.numel() for p in model.parameters())
    first_names: dict[int, str] = {}
    root: dict = {"sections": {}}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first_names.setdefault(id(parameter), full_name)
        count = parameter.numel() if owner == full_name else 0
        section = root
        for part in _sections(full_name, model.base_model_prefix):
            section = section["sections"].setdefault(part, {"count": 0, "parameters": [], "sections": {}})
            section["count"] += count
        section["parameters"].append(
            {
                "name": full_name,
                "shape": list(parameter.shape),
                "count": count,
                "share": count / total,
                "tied_to": None if owner == full_name else owner,
            }
        )

    def listed(sections: dict) -> list[dict]:
        return [
            {
                "name": section_name,
                "count": section["count"],
                "share": section["count"] / total,
                "parameters": section["parameters"],
                "sections": listed(section["sections"]),
            }
            for section_name, section in sections.items()
        ]

    return {"name": name, "model": type(model).__name__, "total": total, "sections": listed(root["sections"])}


def _build(name: str):
    import torch

    import bertfast
    from bertfast import configuration
    from bertfast.hub import HubOptions

    with torch.device("meta"):
        if name in configuration.PRESETS:
            return bertfast.AutoModel.from_config(configuration.PRESETS[name]())
        fields, repository = configuration.read_config(name, HubOptions())
        config = configuration.config_for(fields, origin=str(repository))
        architecture = (config.architectures or [""])[0]
        return (getattr(bertfast, architecture, None) or bertfast.AutoModel).from_config(config)


def _sections(full_name: str, base_prefix: str) -> Iterator[str]:
    """The sections that a parameter counts in, outermost first."""
    parts = full_name.split(".")
    if parts[0] == base_prefix:
        parts = parts[1:]
    elif parts[0] not in ("embeddings", "encoder", "transformer", "pooler"):
        yield "heads"
        return
    if parts[0] not in ("encoder", "transformer"):
        yield parts[0]
        return
    yield "encoder"
    yield f"layer {parts[2]}"
    kind = "attention" if parts[3] in ("attention", "sa_layer_norm") else "feed-forward"
    yield f"{kind} with its LayerNorm"


def _print(table: dict, full: bool) -> None:
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    for title, justify in (("component", "left"), ("shape", "right"), ("parameters", "right"), ("share", "right")):
        grid.add_column(title, justify=justify, no_wrap=True)

    def row(title: str, item: dict, depth: int, shape: str = "", style: str | None = None) -> None:
        tied = item.get("tied_to")
        count = f"tied to {tied}" if tied else f"{item['count']:,}"
        grid.add_row("  " * depth + title, shape, count, "" if tied else f"{item['share']:.2%}", style=style)

    def walk(sections: list[dict], depth: int) -> None:
        alike = len(sections) > 1 and len({_signature(section) for section in sections}) == 1
        for section in sections[:1] if alike and not full else sections:
            title = f"each of {len(sections)} layers" if alike and not full else section["name"]
            row(title, section, depth, style="bold")
            for parameter in section["parameters"]:
                row(parameter["name"], parameter, depth + 1, " x ".join(map(str, parameter["shape"])))
            walk(section["sections"], depth + 1)

    walk(table["sections"], 0)
    row("total", {"count": table["total"], "share": 1.0}, 0, style="bold")
    console = output()
    console.print(f"{table['name']}: {table['model']}")
    console.print(grid)


def _signature(section: dict) -> tuple:
    """Equal for sections that differ in the layer's number only."""
    shapes = tuple(tuple(parameter["shape"]) for parameter in section["parameters"])
    return section["name"].startswith("layer "), section["count"], shapes, tuple(map(_signature, section["sections"]))
