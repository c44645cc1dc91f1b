"""The `samebit` command: one file per subcommand, each imported only when it is used."""

from __future__ import annotations

import os
from collections.abc import Sequence

SPINS = "1000"
"""How often a thread of torch's OpenMP asks for work before it sleeps. Its own 300,000 make a run several times
slower where other processes want the cores (its threads burn the time that those they wait for need) and
bring nothing where they do not."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code.

    0 done, 1 failed, 2 error of the user, 3 the watchdog stopped the run, 130 and 143: left on SIGINT or
    SIGTERM.
    """
    share_cores()
    from samebit.cli.dispatch import run_command

    return run_command(argv)


def share_cores() -> None:
    """Let idle threads sleep early, unless the user has set how they wait. Read when torch is imported."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
