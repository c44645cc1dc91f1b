"""`samebit rollout`: prompts in, completions out, both JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from samebit.cli.arguments import Arguments, Option, expect, help_text, parse, require_place
from samebit.cli.policy import find_target, load_policy
from samebit.config import RolloutConfig
from samebit.models.tokenizer import Tokenizer
from samebit.reporter import Reporter
from samebit.types import Group, Prompt

USAGE = (
    "samebit rollout MODEL|RUN|CHECKPOINT [--recipe NAME] [--prompts FILE] [--out FILE] "
    "[--any.key VALUE]"
)
ABOUT = (
    "Each line of FILE (default: standard input) is an object with `prompt` (text, put through\n"
    "the chat template; or a chat, a list of {role, content}). A line out is one completion.\n"
    "Keys of [rollout] need no section here: --max-tokens is --rollout.max-tokens."
)
OPTIONS = (
    Option("prompts", "FILE", "JSON lines with `prompt` (default: standard input)"),
    Option("out", "FILE", "a new file for the completions (default: standard output)"),
    Option("samples", "N", "completions per prompt (default 1)"),
    Option("raw", "", "text prompts go in as they are, without the chat template"),
    Option("logps", "", "also write token ids and the sampler's log-probs"),
)
KEYS = (
    Option("model", "M", "weights to sample from, under the settings of RUN, not its checkpoint's"),
    Option(
        "recipe", "NAME", "recipe to sample under (default: the run's or export's own, else fp8)"
    ),
    Option("seed", "N", "of the sampling noise"),
    Option("max-tokens", "N", "longest completion"),
    Option("temperature", "X", "sampling temperature; 0 is greedy"),
    Option("top-p", "X", "nucleus mass; 1 is off"),
    Option("top-k", "N", "tokens kept; 0 is off"),
    Option("stop", "LIST", "strings that end a completion"),
)
"""Of the configuration, for the help text."""


def run(args: Sequence[str]) -> int:
    """Sample and write."""
    found = parse(args, OPTIONS, overridable=True)
    if found.flag("help"):
        print(help_text(USAGE, ABOUT, (*OPTIONS, *KEYS)))
        return 0
    (name,) = expect(found, ["MODEL, RUN or CHECKPOINT"], USAGE)
    samples = found.number("samples", 1)
    require_place("out", found.text("out"))
    _require_new(found.text("out"), found.text("prompts"))
    target = find_target(name, [(_whole_key(key), value) for key, value in found.overrides])
    rows = list(_read_rows(found.text("prompts")))
    if not rows:
        raise ValueError(f"{found.text('prompts') or 'standard input'}: no prompt")
    model, tokenizer, _ = load_policy(target)
    prompts = [_prompt(i, row, tokenizer, found.flag("raw")) for i, row in enumerate(rows)]
    groups = _generate(target.config, model, tokenizer, prompts, samples)
    _write(found, groups)
    return 0


def _whole_key(key: str) -> str:
    """`rollout.max-tokens` of `max-tokens`; any other key as it is."""
    short = {field.name for field in fields(RolloutConfig)}
    return f"rollout.{key}" if key.replace("-", "_") in short else key


def _generate(
    config: Any, model: Any, tokenizer: Tokenizer, prompts: list[Prompt], samples: int
) -> list[Group]:
    from samebit.engine.api import load_engine
    from samebit.engine.requests import positions_warning
    from samebit.run_checks import sampling_of

    rollout = config.rollout
    sampling = sampling_of(config)
    engine = load_engine(rollout.engine)(model, rollout, tokenizer, config.seed)
    reporter = Reporter()
    try:
        if (cut := positions_warning(sampling, model.config)) is not None:
            reporter.note(cut)
        return engine.generate(prompts, samples, sampling, 0, reporter.progress("rollout"))
    finally:
        reporter.close()
        engine.close()


def _require_new(out: str, prompts: str) -> None:
    """ValueError where `--out` is there already: completions are not drawn again for the asking."""
    if not out or not Path(out).exists():
        return
    if prompts and Path(prompts).exists() and Path(out).samefile(prompts):
        raise ValueError(f"--out {out}: is the file of --prompts; choose another file")
    if not Path(out).is_file():
        raise ValueError(
            f"--out {out}: is a device or a pipe; leave --out away for standard output"
        )
    raise ValueError(f"--out {out}: already exists; remove it or choose another file")


def _read_rows(path: str) -> Iterator[Any]:
    """The `prompt` of every line; ValueError naming file and line."""
    where = path or "standard input"
    lines = _read_text(path).split("\n") if path else sys.stdin
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}, line {number}: not JSON ({error})") from None
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not (_is_chat(prompt) or (isinstance(prompt, str) and prompt)):
            raise ValueError(
                f"{where}, line {number}: needs `prompt`, a text or a list of "
                '{"role": ..., "content": ...}'
            )
        yield prompt


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"--prompts {path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error})") from None


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(m, dict)
            and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str)
            for m in value
        )
    )


def _prompt(index: int, value: Any, tokenizer: Tokenizer, raw: bool) -> Prompt:
    if isinstance(value, str) and raw:
        return Prompt(id=str(index), ids=tuple(tokenizer.encode_prompt(value)), text=value)
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    text = value if isinstance(value, str) else messages[-1]["content"]
    ids = tuple(tokenizer.apply_chat_template(messages))
    return Prompt(id=str(index), ids=ids, text=text, messages=tuple(messages))


def _write(found: Arguments, groups: list[Group]) -> None:
    path = found.text("out")
    if not path:
        _write_lines(sys.stdout, groups, found.flag("logps"))
        return
    temporary = Path(path).with_name(f".{Path(path).name}.partial")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            _write_lines(file, groups, found.flag("logps"))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_lines(stream: TextIO, groups: list[Group], logps: bool) -> None:
    for group in groups:
        for sample in group.samples:
            record: dict[str, Any] = {
                "prompt": list(group.prompt.messages) or group.prompt.text,
                "completion": sample.text,
                "finish_reason": sample.finish_reason,
                "tokens": len(sample.ids),
                "sample_id": sample.sample_id,
            }
            if logps:
                record["ids"] = list(sample.ids)
                # float32 values survive the decimal text exactly
                record["logps"] = [float(v) for v in sample.logps]
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")
    stream.flush()
