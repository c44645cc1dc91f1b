"""The `samebit` command: one file per subcommand, each imported only when it is used."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code.

    0 done, 1 failed, 2 error of the user, 3 the watchdog stopped the run, 130 and 143: left on SIGINT or
    SIGTERM.
    """
    from samebit.cli.dispatch import run_command

    return run_command(argv)
