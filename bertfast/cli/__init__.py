"""The console command `bertfast`.

Every error that a user can cause is one line on standard error and exit code 2; `--traceback` or `BERTFAST_DEBUG=1`
shows where it came from. The modules of the commands import torch inside their functions only, so help is quick.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence

import click

from bertfast.cli.bench import bench
from bertfast.cli.check import check
from bertfast.cli.embed import embed
from bertfast.cli.info import info
from bertfast.cli.params import params

_LONGEST_MESSAGE = 400


def _print_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        import bertfast

        click.echo(f"bertfast {bertfast.__version__}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Show it, exit."
)
def cli() -> None:
    """An accelerated BERT backend for PyTorch."""


for _command in (info, params, check, embed, bench):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 good, 1 a failed check, 2 an error, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    debug = "--traceback" in arguments or os.environ.get("BERTFAST_DEBUG", "") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--traceback"]
    warnings.showwarning = _show_warning
    _complete_streams()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # unwinds, so files are cleaned up
    try:
        # Not cli.main, which ends the process by itself, and without a word, when standard output is closed.
        with cli.make_context("bertfast", arguments) as context:
            code = cli.invoke(context) or 0
        sys.stdout.flush()
    except click.exceptions.Exit as end:
        code = end.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = _fail("interrupted", 128 + signal.SIGINT)
    except Exception as error:
        if debug:
            traceback.print_exc()
        code = _fail(_message(error))
    sys.exit(code)


def _complete_streams() -> None:
    """Puts /dev/null where a standard stream is closed (None), and escapes where a terminal cannot show a character."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - stays open as long as the process runs
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _fail(message: str, code: int = 2) -> int:
    # What is still buffered for a full disk or a closed pipe would raise once more when the interpreter exits.
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(f"bertfast: error: {message}", file=sys.stderr)
    return code


def _message(error: Exception) -> str:
    """One line for people."""
    if isinstance(error, click.UsageError) and error.ctx is not None:
        text = f"{error.format_message()} (see {error.ctx.command_path} --help)"
    elif isinstance(error, click.ClickException):
        text = error.format_message()
    elif isinstance(error, BrokenPipeError):
        text = "the reader of standard output went away"
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    elif isinstance(error, (ValueError, OSError)) and str(error):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error} (--traceback shows where)"
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} ..."


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"bertfast: warning: {' '.join(str(message).split())}", file=sys.stderr)
