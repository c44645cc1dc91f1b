"""The `samebit` command: one file per subcommand, each imported only when it is used."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code: 0, 1 (failed), 2 (user error) or 130 (Ctrl-C)."""
    from samebit.cli.dispatch import run_command

    return run_command(argv)
