"""The command line: thin commands that parse, call a study and render.

A mistake of the user's is one sentence and exit code 2; a run that failed is exit code 1. Commands are
imported when they are called, and what they need, torch above all, when they run: help pages and the shell's
completion answer at once.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import os
import sys
from typing import Any

import click

from curvlab import __version__
from curvlab.cli.console import plain_warnings
from curvlab.exceptions import (
    CurvlabError,
    DataFolderError,
    PairError,
    ProblemError,
    ResultsFolderError,
    SpecError,
)

__all__ = ["main"]

COMMANDS = {
    "compare": "Measure error, time, memory and convergence, and write one report.",
    "spectrum": "Show the spectrum of a curvature: density, largest eigenvalues, layers.",
    "plan": "Predict memory and operations without allocating: would it fit?",
    "train": "Train one network with any provider and solver, or a baseline.",
    "reproduce": "Run the paper's tables and figures again, beside its numbers.",
    "list": "List providers, solvers, criteria, architectures and data sets.",
    "report": "Render the report of a results folder again.",
    "merge": "Join several results folders into one.",
}
OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO, errno.EBADF)
USAGE_ERRORS = (SpecError, PairError, ProblemError, DataFolderError, ResultsFolderError)


class _LazyGroup(click.Group):
    """A group whose commands live in `curvlab.cli.<name>` and are imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"curvlab.cli.{'list_' if name == 'list' else name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first word names; a word that is none gets the nearest one in the message."""
        near = difflib.get_close_matches(args[0], COMMANDS, n=1)
        if args[0] not in COMMANDS and near and not args[0].startswith("-"):
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{near[0]}'?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run; on a terminal or in a file of another encoding, letters that it lacks are shown as `?`."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            os.getcwd()
        except FileNotFoundError:  # torch's own libraries do not load there
            click.echo("Error: the working folder has been removed; change to another one", err=True)
            sys.exit(2)
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with plain_warnings():
                return super().invoke(ctx)
        except CurvlabError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(2 if isinstance(error, USAGE_ERRORS) else 1)
        except OSError as error:
            # An error of a file names it, one of standard output does not. A closed pipe is click's.
            if error.filename is not None or error.errno not in OUTPUT_ERRORS:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python tries again as it ends
            click.echo(
                f"Error: cannot write to standard output: {error.strerror}. Redirect it elsewhere", err=True
            )
            sys.exit(1)
        except (MemoryError, RuntimeError) as error:
            if not _lacks_memory(error):
                raise
            reason = str(error).partition("\n")[0] or "the system gave no more"
            click.echo(
                f"Error: not enough memory ({reason}). Use a smaller network or --batch; `curvlab plan` with "
                f"the same options says what would fit. What was stored before is unchanged",
                err=True,
            )
            sys.exit(1)


def _lacks_memory(error: Exception) -> bool:
    """Whether an error is torch's, or Python's, for memory that the system did not give.

    On the CPU torch has no class of its own for it.
    """
    named = type(error).__name__ in ("MemoryError", "OutOfMemoryError")
    return named or "can't allocate memory" in str(error) or "not enough memory" in str(error)


@click.group(
    cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Curvature analysis and benchmarking for PyTorch.

    Which curvature matrix and which solver should I use for my network, my loss and my data? What does
    each cost in time and memory, how far is it from the true Hessian, and does it train faster?

    \b
    Start with:
      curvlab compare
    """
