"""The `paceline` command: its subcommands, and how it ends.

Owns the list of subcommands and the exit status. What a subcommand needs is imported when it runs, so that `--help`
answers at once. An error that a user can cause ends with one line on stderr and status 2, never with a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from bench.options import add_bench_parser
from dashboards.options import add_dashboards_parser
from distill.options import add_distill_parser
from engine.errors import PacelineError
from paceline import __version__
from paceline.files import add_file_parsers
from paceline.machine import add_doctor_parser
from paceline.plan import add_plan_parser
from paceline.reports import add_report_parsers
from paceline.serve import add_serve_parser

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as shells write it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parser().parse_args(argv)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (PacelineError, OSError) as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    return status


def parser() -> argparse.ArgumentParser:
    """All subcommands and their options."""
    top = argparse.ArgumentParser(
        prog="paceline",
        description="LLM serving on Ray Serve with speculative decoding that never costs more than it gives.",
    )
    top.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    add_serve_parser(commands)
    add_doctor_parser(commands)
    add_file_parsers(commands)
    add_report_parsers(commands)
    add_plan_parser(commands)
    add_bench_parser(commands)
    add_distill_parser(commands)
    add_dashboards_parser(commands)
    return top


if __name__ == "__main__":
    sys.exit(main())
