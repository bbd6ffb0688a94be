"""`bertfast bench`: bertfast next to what else there is, op by op and model by model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bertfast.cli.console import DTYPES, device_of, device_option, note, output

if TYPE_CHECKING:
    from bertfast.benchmarks.records import Row, Skipped
    from bertfast.benchmarks.suite import Plan

PASSES = ("forward", "backward", "both", "inference", "training")
FILLS = ("dense", "half", "mixed")
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.argument("subjects", nargs=-1, metavar="[SUBJECT]...")
@click.option("--pass", "passes", type=click.Choice(PASSES), multiple=True, help="Of an op, or of a model.")
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, help="Rows.")
@click.option("--length", "lengths", type=click.IntRange(1), multiple=True, help="Tokens in a row, with padding.")
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="What is computed in.")
@click.option("--fill", "fills", type=click.Choice(FILLS), multiple=True, help="How much of a batch is tokens.")
@device_option
@click.option("--rounds", type=click.IntRange(1), help="How often each timing is repeated.")
@click.option("--quick", is_flag=True, help="One small cell of each kind, few rounds.")
@click.option("--compile", "compiled", is_flag=True, help="Also torch.compile, which takes minutes.")
@click.option("--graphs", is_flag=True, help="Time replays of CUDA graphs instead of calls; on a GPU only.")
@click.option("--json", "target", type=FILE, help="Write results to this new file, one line each.")
@click.option("--resume", type=FILE, help="Continue this file of a run that was interrupted; give its options again.")
@click.option("--report", "folder", type=FOLDER, help="Write plots and a page of the results into this folder.")
@click.option("--results", "files", type=FILE, multiple=True, help="With --report: of these files, nothing is run.")
@click.option("--compare", nargs=2, type=FILE, metavar="A B", help="Show what changed between two files; runs nothing.")
def bench(
    subjects,
    passes,
    batches,
    lengths,
    dtypes,
    fills,
    device,
    rounds,
    quick,
    compiled,
    graphs,
    target,
    resume,
    folder,
    files,
    compare,
) -> int:
    """Measure ops and models next to PyTorch and transformers.

    SUBJECT is an op (attention, varlen_attention, add_layer_norm, linear_gelu, feed_forward, embed_layer_norm,
    qkv_projection) or a model with random weights (bert-base, bert-large, distilbert-base, roberta-base); by default
    all of them. Options that choose can be repeated.

    Results are compared with float64 first: what is wrong, or fails, is a line with the reason and has no number.
    Contestants take turns; a first call, which may compile, is timed apart. An interrupted run keeps what it has.
    What a CUDA graph cannot hold has no number with --graphs; bertfast's models compute padding in one.

    Exit code 1 if bertfast's own result was wrong or failed somewhere.
    """
    if compare:
        from bertfast.benchmarks import compare as comparison

        return comparison.main(*compare)
    if files:
        if folder is None:
            raise click.UsageError("--results needs --report")
        _report(files, folder)
        return 0
    if target is not None and resume is not None:
        raise click.UsageError("--json starts a file and --resume continues one: give one of them")
    if target is not None and target.exists():
        raise ValueError(f"{target} exists: --resume continues it, another name starts a new one")
    if resume is not None and not resume.is_file():
        raise ValueError(f"{resume}: no such file to continue")

    from bertfast.benchmarks import suite

    for name in subjects:
        suite.check_name(name)
    plan = suite.Plan.of(
        suite.use(device_of(device)),
        quick,
        subjects=tuple(dict.fromkeys(subjects)),
        passes=passes,
        batches=batches,
        lengths=lengths,
        dtypes=dtypes,
        fills=fills,
        rounds=rounds,
        compiled=compiled,
        graphs=graphs,
    )
    if folder is not None and target is None and resume is None:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / "results.jsonl"
        if target.exists():
            raise ValueError(f"{target} exists: give --resume or --results with it, or another folder")
    path = target or resume
    entries = _measure(plan, path)
    if folder is not None:
        _report([path], folder)
    failed = suite.failures(entries)
    if failed:
        note(f"bertfast has no number in {len(failed)} places where it should have one")
    return 1 if failed else 0


def _measure(plan: Plan, path: Path | None) -> list[Row | Skipped]:
    """Runs it, shows the table, also when interrupted; returns what was measured now and before."""
    from bertfast.benchmarks import measure, records, suite

    cells = plan.cells()
    if not cells:
        raise ValueError("these options leave nothing to measure")
    before = records.read(path) if path is not None and path.exists() else records.Results()
    # Before it was written, only calls were timed.
    others = {run.timing or "calls" for run in before.runs if run.timing or plan.graphs} - {plan.timing}
    if others:
        raise ValueError(f"{path} has been timed by {', '.join(sorted(others))}, this would be by {plan.timing}")
    entries: dict[str, Row | Skipped] = {entry.key: entry for entry in (*before.rows, *before.skipped)}
    with ExitStack() as stack:
        writer = stack.enter_context(records.Writer(path)) if path is not None else None
        try:
            with _progress(len(cells)) as (show, advance):
                for found in suite.run(plan, command=_command(), done=suite.done_in(before), show=show):
                    if writer is not None:
                        writer.write(*found)
                    if found and isinstance(found[0], records.Run):
                        note(f"{measure.machine_line(found[0].machine)}; timed by {found[0].timing}")
                        found = found[1:]
                    else:
                        advance()
                    entries.update((entry.key, entry) for entry in found)
        finally:
            _print(list(entries.values()))
            if path is not None:
                note(f"{len(entries)} results: {path}")
    return list(entries.values())


def _command() -> list[str]:
    """The command that measures this again, without its files."""
    context = click.get_current_context()
    words = ["bertfast", "bench", *context.params["subjects"]]
    for option in context.command.params:
        if not isinstance(option, click.Option) or isinstance(option.type, click.Path):
            continue
        value = context.params[option.name]
        if option.is_flag:
            words += [option.opts[0]] if value else []
        elif value is not None and value != option.default:
            for item in value if option.multiple else [value]:
                words += [option.opts[0], str(item)]
    return words


@contextmanager
def _progress(total: int) -> Iterator[tuple]:
    """On a terminal: a bar of cells with what is being done and how long it will take."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield (
            lambda what: progress.update(task, description=what),
            lambda: progress.advance(task),
        )


def _report(files: Sequence[Path], folder: Path) -> None:
    from bertfast.benchmarks import report

    note(f"report: {report.write(list(files), folder)}")


def _print(entries: Sequence[Row | Skipped]) -> None:
    from rich.table import Table

    from bertfast.benchmarks.records import Row

    console = output()
    rows = [entry for entry in entries if isinstance(entry, Row)]
    for subject in dict.fromkeys(row.subject for row in rows):
        console.print(f"\n{subject}", style="bold", markup=False)
        table = Table(box=None, pad_edge=False)
        titles = "pass", "B x S", "fill", "dtype", "contestant"
        numbers = "ms", "10-90 %", "speed-up", "10-90 %", "of floor", "GFLOP/s", "GB/s", "peak MB", "first ms"
        for title in titles:
            table.add_column(title, no_wrap=True)
        for title in numbers:
            table.add_column(title, justify="right", no_wrap=True)
        cell = None
        for row in (row for row in rows if row.subject == subject):
            if cell not in (None, row.cell):
                table.add_section()
            head = (row.pass_, f"{row.batch} x {row.length}", row.fill, row.dtype) if row.cell != cell else ("",) * 4
            table.add_row(*head, row.contestant, *_numbers(row))
            cell = row.cell
        console.print(table)
    _print_skipped(console, [entry for entry in entries if not isinstance(entry, Row)])


def _numbers(row: Row) -> tuple[str, ...]:
    ratio = row.speedup
    return (
        f"{1e3 * row.median:.3f}",
        f"{1e3 * row.p10:.3f}-{1e3 * row.p90:.3f}",
        f"{ratio['median']:.2f}x" if ratio else "",
        f"{ratio['p10']:.2f}-{ratio['p90']:.2f}" if ratio else "",
        f"{row.of_floor:.0%}",
        f"{row.flops_per_second / 1e9:.1f}" if row.flops else "",
        f"{row.bytes_per_second / 1e9:.1f}",
        "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f}",
        f"{1e3 * row.first_call_seconds:.1f}",
    )


def _print_skipped(console, skipped: Sequence[Skipped]) -> None:
    """One line for each contestant and reason."""
    places: dict[tuple[str, str], list[Skipped]] = {}
    for entry in skipped:
        places.setdefault((entry.contestant, entry.reason), []).append(entry)
    if places:
        console.print("\nNot measured", style="bold")
    for (contestant, reason), found in places.items():
        where = str(found[0].cell) if len(found) == 1 else f"{found[0].cell} and {len(found) - 1} more"
        console.print(f"  {contestant}: {reason} ({where})", markup=False, soft_wrap=True)
