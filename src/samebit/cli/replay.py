"""`samebit replay`: run the step of a repro bundle again and compare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from samebit.cli.arguments import Option, expect, help_text, parse
from samebit.cli.validate import model_of

USAGE = "samebit replay RUN/repro/step_N"
ABOUT = (
    "Loads the weights of the checkpoint that the bundle names, runs the recorded samples through the\n"
    "training forward, draws them again, and says which numbers have the recorded bits and which\n"
    "operator differs first. Exit code 0: the trainer's numbers repeat. 1: they do not."
)
OPTIONS = (
    Option("no-redraw", "", "do not draw the samples again"),
    Option("json", "", "print the comparison as JSON"),
)


def run(args: Sequence[str]) -> int:
    """0 when every recorded number of the trainer came out again, 1 when not."""
    found = parse(args, OPTIONS)
    if found.flag("help"):
        print(help_text(USAGE, ABOUT, OPTIONS))
        return 0
    (folder,) = expect(found, ["FOLDER"], USAGE)
    from samebit.replay import replay

    with model_of(f"{folder}/config.toml"):
        result = replay(folder, redraw=not found.flag("no-redraw"))
    if found.flag("json"):
        print(json.dumps(asdict(result) | {"repeats": result.repeats}, indent=2))
    else:
        print("\n".join(result.describe()))
    return 0 if result.repeats else 1
