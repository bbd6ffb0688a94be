"""`bertfast embed`: a text file to a .npy file of vectors."""

from __future__ import annotations

import os
import time

import click

from bertfast.cli.console import device_of, device_option, dtype_option, note, working


@click.command()
@click.argument("path")
@click.option("--input", "source", required=True, help="UTF-8 text, one text a line; - reads standard input.")
@click.option("--output", "target", required=True, help="The .npy file: fp32, row i is line i.")
@click.option("--pooling", type=click.Choice(["auto", "mean", "cls", "max", "mean_sqrt_len_tokens"]), default="auto")
@click.option("--normalize", type=click.Choice(["auto", "yes", "no"]), default="auto", help="Vectors of length 1.")
@click.option("--token-budget", type=click.IntRange(1), help="Tokens in a batch, padding included.")
@click.option("--max-length", type=click.IntRange(3), help="Tokens that a text is cut to, if below the limit.")
@click.option("--int8", is_flag=True, help="By int8 layers (bertfast.quantize), on the CPU: faster, less exact.")
@dtype_option
@device_option
def embed(path, source, target, pooling, normalize, token_budget, max_length, int8, dtype, device) -> None:
    """Write a vector for every line of a file.

    PATH is a checkpoint's folder or hub id. Pooling and normalisation are the checkpoint's own (1_Pooling,
    modules.json) unless given; without those files, the mean and no normalisation.

    An empty line is kept and embedded as the empty text. A line longer than the length limit is cut there; of a line of
    more than 1 MiB only the first 1 MiB is looked at. The output appears only when it is complete.
    """
    from bertfast.cli.lines import opened
    from bertfast.cli.npy import check_target

    check_target(target)
    if source != "-" and os.path.exists(target) and os.path.exists(source) and os.path.samefile(source, target):
        raise ValueError(f"{target} is the input")
    with opened(source) as file:
        from bertfast import encode

        with working(f"loading {path}"):
            import torch

            encoder = encode.Encoder.from_pretrained(
                path,
                pooling=None if pooling == "auto" else pooling,
                normalize=None if normalize == "auto" else normalize == "yes",
                dtype=getattr(torch, dtype),
                device=device_of(device),
                token_budget=token_budget or encode.TOKEN_BUDGET,
                max_length=max_length,
                int8=int8,
            )
        start = time.perf_counter()
        rows = _stream(encoder, file, source, target)
        note(f"{rows:,} x {encoder.dimension:,} vectors in {time.perf_counter() - start:.1f} s: {target}")


def _stream(encoder, file, source: str, target: str) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from bertfast.cli.lines import read_lines, size_of
    from bertfast.cli.npy import NpyWriter

    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %  {task.fields[rows]:,} lines"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("embed", total=size_of(file), rows=0)
        name = "standard input" if source == "-" else source
        lines = read_lines(file, name, lambda count: progress.advance(task, count))
        with NpyWriter(target, encoder.dimension) as out:
            for vectors in encoder.encode_lines(lines):
                out.write(vectors)
                progress.update(task, rows=out.rows)
            if not out.rows:
                raise ValueError(f"{name} is empty")
    return out.rows
