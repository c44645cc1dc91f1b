"""From the command line to a subcommand, and from its errors to one clear line and an exit code."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import samebit
from samebit.errors import RunLeft, RunStopped

COMMANDS = {
    "train": "train a policy from a TOML file",
    "eval": "mean reward on held-out prompts, under one or several recipes",
    "rollout": "prompts in, completions out (JSON lines)",
    "export": "write a run's policy as a Hugging Face folder, BF16 or FP8",
    "study": "arms x seeds from one TOML file; a table and a page at the end",
    "report": "one self-contained HTML page of one or several runs",
    "flow": "show a recipe's precision flow, or what differs between two",
    "check": "what this machine can do, and the parity chain on it",
    "replay": "run the step that a stopped run left in repro/step_N again, and compare",
    "bench": "measure kernels, rollout or a training step on a Hopper GPU, row by row",
    "trace": "digests of every operator on both sides; names the first that differs",
}

USER_ERROR = 2
STOPPED = 3


def usage() -> str:
    """The text of `samebit --help`."""
    lines = [
        "usage: samebit COMMAND ...",
        "",
        "Reinforcement learning where rollout and training are the same function, bit for bit.",
        "",
        "commands:",
        *(f"  {name:9s} {text}" for name, text in COMMANDS.items()),
        "",
        "options:",
        "  --help     this text; `samebit COMMAND --help` for a command's own",
        "  --version  print the version",
        "  --debug    show the whole traceback of an error",
    ]
    return "\n".join(lines)


def run_command(argv: Sequence[str] | None) -> int:
    """Dispatch; never raises for errors of users, files or the keyboard."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    if not args or args[0] in ("--help", "-h", "help"):
        print(usage())
        return 0 if args else USER_ERROR
    if args[0] in ("--version", "-V"):
        print(f"samebit {samebit.__version__}")
        return 0
    name = args[0]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"commands: {', '.join(COMMANDS)}"
        print(f"samebit: error: unknown command {name!r}; {hint}", file=sys.stderr)
        return USER_ERROR
    if name != "train" and several_processes():
        return _failed(name, "runs in one process; only train is for torchrun", USER_ERROR, debug)
    return _guarded(name, args[1:], debug)


def several_processes() -> bool:
    """Whether torchrun started this one beside others."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def _guarded(name: str, args: list[str], debug: bool) -> int:
    try:
        from samebit.log import setup_logging

        setup_logging(debug)
        return importlib.import_module(f"samebit.cli.{name}").run(args)
    except RunLeft as left:
        advice = "" if left.exit_code == 1 else "; continue with --resume"
        print(f"samebit {name}: {left}{advice}", file=sys.stderr)
        return left.exit_code
    except RunStopped as stopped:
        return _failed(name, str(stopped), STOPPED, debug)
    except KeyboardInterrupt:
        print(f"\nsamebit {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone (`| head`): nothing to say, and nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        return _failed(name, str(error) or type(error).__name__, USER_ERROR, debug)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"  # of a user's own module, as often as not
        text = (
            f"{type(error).__name__}: {error} (run again with --debug for the traceback; {where})"
        )
        return _failed(name, text, 1, debug)


def _failed(name: str, text: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    who = f" (process {os.environ.get('RANK')})" if several_processes() else ""
    # in one piece: of several processes each may have something to say
    sys.stderr.write(f"samebit {name}{who}: error: {' '.join(text.split())}\n")
    return code
