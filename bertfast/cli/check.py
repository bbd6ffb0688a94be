"""`bertfast check`: accuracy, speed and sense of a checkpoint, next to stock transformers."""

from __future__ import annotations

import click

from bertfast.cli.console import device_of, device_option, dtype_option, json_option, output, print_json, working


@click.command()
@click.argument("path")
@click.option("--input", "source", help="UTF-8 text, one text a line; by default sentences that come with the package.")
@click.option(
    "--rounds", type=click.IntRange(1), default=7, show_default=True, help="How often each timing is repeated."
)
@click.option("--int8", is_flag=True, help="Also our model with int8 layers (bertfast.quantize), on the CPU.")
@dtype_option
@device_option
@json_option
def check(path: str, source: str | None, rounds: int, int8: bool, dtype: str, device: str, as_json: bool) -> int:
    """Compare with stock transformers: error, speed, neighbours.

    PATH is a checkpoint's folder or hub id. Three parts: the error of both against transformers in float64; their
    speed on one sentence, on a full batch and on a batch of mixed lengths; the nearest neighbours of three sentences.

    The first 2,000 lines of the input are used, empty ones left out. Exit code 1 if our error is larger than twice
    that of transformers (plus what rounding explains). The error of int8 layers is reported and not judged.
    """
    from bertfast.cli.lines import opened, read_lines

    with opened(source or _bundled()) as file:
        from bertfast.cli import comparison

        texts = comparison.take_texts(read_lines(file, source or "the bundled sentences"))
    with working(f"loading {path}") as show:
        report = comparison.compare(
            path, texts, dtype=dtype, device=device_of(device), rounds=rounds, show=show, int8=int8
        )
    if as_json:
        print_json(report)
    else:
        _print(report)
    return 0 if report["accuracy"]["passed"] else 1


def _bundled() -> str:
    from importlib import resources

    return str(resources.files("bertfast.benchmarks") / "data" / "sentences.txt")


def _print(report: dict) -> None:
    from rich.table import Table

    console = output()

    def section(title: str, *columns: str) -> Table:
        console.print(f"\n{title}", style="bold")
        table = Table(box=None, pad_edge=False)
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
        return table

    console.print(f"{report['checkpoint']}: {report['model']}, {report['dtype']} on {report['device']}", markup=False)
    console.print(report["machine_line"], markup=False)

    accuracy = report["accuracy"]
    title = f"Error against transformers in float64, {accuracy['tokens']:,} tokens, and of the texts' vectors"
    table = section(title, "", "largest", "RMS", "vectors' largest", "mean cosine", "worst cosine")
    for name, error in accuracy["errors"].items():
        vectors = error["vectors"]
        cosines = (f"{vectors[key]:.6f}" for key in ("mean_cosine", "worst_cosine"))
        table.add_row(name, f"{error['max']:.3g}", f"{error['rms']:.3g}", f"{vectors['max']:.3g}", *cosines)
    console.print(table)
    console.print(
        f"{'PASS' if accuracy['passed'] else 'FAIL'}: bertfast {accuracy['errors']['bertfast']['max']:.3g}, "
        f"limit {accuracy['limit']:.3g} (2 x the larger stock error + rounding {accuracy['noise_floor']:.3g})",
        style="green" if accuracy["passed"] else "bold red",
    )

    for case in report["speed"]:
        shape = f"{case['rows']} x {case['longest']} tokens" if case["rows"] > 1 else f"{case['longest']} tokens"
        if case["mean"] < case["longest"]:
            shape += f", mean {case['mean']:.1f} = {case['mean'] / case['longest']:.0%} of the longest"
        table = section(f"{case['name']}: {shape}", "", "ms", "10-90 %", "tokens/s", "bertfast's gain", "10-90 %")
        for name, timing in case["timings"].items():
            ms, ratio = timing["ms"], timing["bertfast_speedup"]
            table.add_row(
                name,
                f"{ms['median']:.2f}",
                f"{ms['p10']:.2f}-{ms['p90']:.2f}",
                f"{timing['tokens_per_second']:,.0f}",
                f"{ratio['median']:.2f}x" if ratio else "",
                f"{ratio['p10']:.2f}-{ratio['p90']:.2f}" if ratio else "",
            )
        console.print(table)
    console.print(
        f"(medians of {report['rounds']} rounds, contestants in turn; ratios within a round; padding not counted)"
    )

    section("Nearest neighbours by cosine, vectors of bertfast")
    for query in report["neighbours"]:
        console.print(f"  {_short(query['text'])}", markup=False, style="bold")
        for found in query["nearest"]:
            console.print(f"    {found['cosine']:.3f}  {_short(found['text'])}", markup=False)


def _short(text: str, width: int = 100) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
