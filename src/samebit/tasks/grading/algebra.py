"""Equality by algebra, through math-verify: runs in the grading workers only.

Only its LaTeX reader is used (a grammar); its plain-text reader would hand the completion to
sympy's parser, which calls eval. The guard below makes that impossible even by accident.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from samebit.tasks.grading.plain import quick_verdict, split_pair

_NUMBER_CODE = re.compile(
    r"\s*(Integer|Float|Symbol)\s*\(\s*'?([A-Za-z0-9_.+-]{1,20000})'?\s*\)\s*"
)
_WARM_UP = (
    (r"m \geq \sqrt{2}", r"m \in [\sqrt{2}, +\infty)"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\{1,2\}", r"\{2,\frac{3}{3}\}"),
    (r"(1,\pi)", r"(1,2\pi)"),
    (r"10^{10}", r"2\times 10^3"),
)


class _Library:
    """math-verify, imported and warmed up once a process."""

    def __init__(self) -> None:
        import sympy.physics.units  # noqa: F401 (imported lazily in comparisons, and needs eval)
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
        from sympy.parsing import sympy_parser

        self._parse, self._verify = parse, verify
        # Reading takes most of the time, and the samples of a group share gold and often answers.
        self.read = lru_cache(maxsize=4096)(self._read)
        self._config = LatexExtractionConfig(
            normalization_config=NormalizationConfig(
                basic_latex=True,
                units=False,
                malformed_operators=True,
                nits=True,
                boxed="none",
                equations=False,
            ),
            boxed_match_priority=-1,
        )
        sympy_parser.eval_expr = _numbers_only  # type: ignore[assignment]
        for gold, answer in _WARM_UP:
            self.equal(gold, answer)

    def _read(self, text: str) -> Any:
        """Return what math-verify reads, an empty list where it cannot read the text."""
        return self._parse(
            f"${text}$",
            [self._config],
            fallback_mode="no_fallback",
            parsing_timeout=None,  # type: ignore[arg-type]
        )

    def equal(self, gold: str, answer: str) -> bool:
        """Compare, gold first: the comparison is not symmetric."""
        gold_read, answer_read = self.read(gold), self.read(answer)
        if not gold_read or not answer_read:
            return False
        return bool(self._verify(gold_read, answer_read, timeout_seconds=None, raise_on_error=True))


def _numbers_only(code: str, local_dict: dict, global_dict: dict) -> Any:
    """Stand in for sympy's eval: builds the literals the LaTeX grammar makes and nothing else."""
    import sympy

    match = _NUMBER_CODE.fullmatch(code)
    if match is None:
        raise ValueError("only number and symbol literals may be built from text")
    kind, literal = match.groups()
    if kind == "Integer":
        return sympy.Integer(int(literal))
    return sympy.Float(literal) if kind == "Float" else sympy.Symbol(literal)


_library: _Library | None = None


def setup(_: Any) -> None:
    """Import and warm up; called once before the first item."""
    global _library
    _library = _Library()


def grade(item: tuple[str, str, float]) -> float:
    """Grade (gold, answer, tolerance): 1 for equal, 0 for not.

    Raises whatever the comparison raises: that is no verdict, not a wrong answer.
    """
    gold, answer, tolerance = item
    quick = quick_verdict(gold, answer, tolerance)
    if quick is not None:
        return float(quick)
    assert _library is not None, "setup comes first"
    left, right = split_pair(gold, answer)
    return float(_library.equal(left.text, right.text))
