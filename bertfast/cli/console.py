"""What the commands share: JSON on standard output, tables for people, progress on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import torch
    from rich.console import Console

DTYPES = ("float32", "bfloat16", "float16")

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
dtype_option = click.option(
    "--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="What the model computes in."
)
device_option = click.option(
    "--device", default="auto", show_default=True, help="cpu, cuda, cuda:1; auto: a GPU if any."
)


def print_json(value: object) -> None:
    """Indented JSON on standard output, in ASCII where that does not take UTF-8."""
    unicode = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    click.echo(json.dumps(value, indent=2, ensure_ascii=not unicode))


def output() -> Console:
    """A console on standard output: as wide as the terminal, wide enough for every table where there is none."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


@contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """Shows what is being done, on a terminal only; yields a function that changes the message."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(message) as status:
            yield status.update
    else:
        yield lambda message: None


def note(message: str) -> None:
    """A line for people on standard error."""
    print(message, file=sys.stderr)


def device_of(name: str) -> torch.device:
    """The torch device of `--device`.

    Raises:
        ValueError: there is no such device here.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device
