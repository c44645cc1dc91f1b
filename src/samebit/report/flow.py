"""The precision flow of a recipe as a drawing: rollout, training forward and backward side by side.

Input is the recipe as plain values (`Recipe.to_dict`, or the `recipe` of a run's plan.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

COLORS = {
    "e4m3": "#2f6fdf",
    "int8": "#c2680a",
    "int4": "#a83232",
    "bf16": "#7c8594",
    "fp32": "#7a4fd0",
    "ids": "#7c8594",
}
"""One colour per format, legible on light and on dark."""

_LINEARS = ("qkv", "out", "gate_up", "down", "head")
_ROWS = (
    ("embedding", "embedding"),
    ("norm", "RMS norm"),
    ("qkv", "Q, K, V"),
    ("rotary", "rotary"),
    ("attention", "attention"),
    ("out", "out"),
    ("residual", "+ residual"),
    ("norm", "RMS norm"),
    ("gate_up", "gate, up"),
    ("silu_mul", "SiLU x up"),
    ("down", "down"),
    ("residual", "+ residual"),
    ("norm", "final norm"),
    ("head", "head"),
    ("log_prob", "log-prob"),
)
_LANE, _BOX, _ROW, _TOP = 340, 208, 52, 58
_STYLE = """
.f text{font:12px system-ui,sans-serif;fill:var(--ink,#1c2430)}
.f .box{fill:var(--card,#fff);stroke:var(--line,#ccd3dd)}.f .small{font-size:11px}
.f .head{font-weight:600;font-size:14px}.f .muted{fill:var(--muted,#667085)}
"""


def precision_text(precision: Mapping[str, Any]) -> str:
    """`e4m3 1x128`, `int8 1xall`, `bf16`."""
    block = precision.get("block")
    if block is None:
        return str(precision["format"])
    return f"{precision['format']} " + "x".join(str(n or "all") for n in block)


def _input_of(flow: Mapping[str, Any], row: str) -> Mapping[str, Any]:
    """The precision in which a row's operator reads its input."""
    if row in _LINEARS:
        return flow[row]["lhs"]
    if row == "attention":
        return flow["attention"]["q"]
    if row == "log_prob":
        return {"format": "fp32"}
    if row == "embedding":
        return {"format": "ids"}
    return flow["between"]


def _detail_of(flow: Mapping[str, Any], row: str) -> Mapping[str, Any] | None:
    """What else the operator reads: the weight, or the KV cache."""
    if row in _LINEARS:
        return flow[row]["rhs"]
    if row == "attention":
        return flow["attention"]["kv"]
    if row == "norm":
        return flow["norm"]
    if row == "embedding":
        return flow["embedding"]
    return None


def _library(flow: Mapping[str, Any], row: str) -> bool:
    """Whether the row is a product of the platform's own library (absent from older plans)."""
    return row in _LINEARS and bool(flow[row].get("library"))


def draw_flow(recipe: Mapping[str, Any], standalone: bool = False) -> str:
    """The SVG; `standalone` gives it a background and its own namespace for a file."""
    lanes = [("Rollout", recipe["rollout"]), ("Training forward", recipe["train"])]
    width, height = 3 * _LANE + 20, _TOP + len(_ROWS) * _ROW + 46
    body = [_markers()]
    for i, (title, flow) in enumerate(lanes):
        body.append(_lane(i * _LANE + 10, title, flow, lanes[1 - i][1]))
    body.append(_backward(2 * _LANE + 10, recipe["backward"]))
    body.append(_legend(height - 18))
    space = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
    ground = f'<rect width="{width}" height="{height}" fill="#fff"/>' if standalone else ""
    return (
        f'<svg class="f"{space} viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="precision flow of {escape(str(recipe["name"]))}"><style>{_STYLE}</style>'
        f"{ground}{''.join(body)}</svg>"
    )


def _markers() -> str:
    ends = "".join(
        f'<marker id="end-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="4.5" '
        f'markerHeight="4.5" orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
        for name, color in COLORS.items()
    )
    return f"<defs>{ends}</defs>"


def _text(x: float, y: float, text: str, kind: str = "", color: str = "") -> str:
    style = f' style="fill:{color}"' if color else ""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}"{style}>{escape(text)}</text>'


def _lane(x: float, title: str, flow: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    body = [_text(x, 22, title, "head")]
    for i, (row, label) in enumerate(_ROWS):
        y = _TOP + i * _ROW
        given, detail = _input_of(flow, row), _detail_of(flow, row)
        library = _library(flow, row)
        same = given == _input_of(other, row) and detail == _detail_of(other, row)
        differs = not same or library != _library(other, row)
        edge = "#d43f3f" if differs else ""
        stroke = f' style="stroke:{edge};stroke-width:1.8"' if edge else ""
        color = COLORS[given["format"]]
        middle = x + 60
        body.append(
            f'<line x1="{middle}" x2="{middle}" y1="{y - 22}" y2="{y - 1}" stroke="{color}" '
            f'stroke-width="2" marker-end="url(#end-{given["format"]})"/>'
        )
        body.append(_text(middle + 9, y - 8, precision_text(given), "small", color))
        body.append(
            f'<rect class="box" x="{x}" y="{y}" width="{_BOX}" height="28" rx="6"{stroke}/>'
        )
        body.append(_text(x + 12, y + 18, label))
        if detail is not None:
            name = "KV" if row == "attention" else "in" if row == "norm" else "W"
            text = f"{name} {precision_text(detail)}" + (", library" if library else "")
            body.append(
                f'<text class="small" x="{x + _BOX - 10}" y="{y + 18}" text-anchor="end" '
                f'style="fill:{COLORS[detail["format"]]}">{escape(text)}</text>'
            )
        if differs:
            body.append(_text(x + _BOX + 8, y + 18, "differs", "small", "#d43f3f"))
    return "".join(body)


def _backward(x: float, backward: Mapping[str, Any]) -> str:
    body = [_text(x, 22, "Training backward", "head")]
    rows = (
        ("input_grad", "dX = dY W", ("dY", "W")),
        ("weight_grad", "dW = dYᵀ X", ("dY", "X")),
    )
    for i, (key, label, names) in enumerate(rows):
        gemm = backward[key]
        y = _TOP + i * 92
        body.append(f'<rect class="box" x="{x}" y="{y}" width="270" height="72" rx="6"/>')
        body.append(_text(x + 12, y + 20, label))
        for j, (side, name) in enumerate(zip(("lhs", "rhs"), names, strict=True)):
            text = f"{name}  {precision_text(gemm[side])}"
            color = COLORS[gemm[side]["format"]]
            body.append(_text(x + 12, y + 41 + 19 * j, text, "small", color))
    y = _TOP + 2 * 92
    body.append(f'<rect class="box" x="{x}" y="{y}" width="270" height="52" rx="6"/>')
    body.append(_text(x + 12, y + 20, "kept for the backward"))
    saved = backward["saved"]
    body.append(_text(x + 12, y + 41, precision_text(saved), "small", COLORS[saved["format"]]))
    note = ("of the four linears of a block;", "masters, gradients of parameters: fp32")
    for j, line in enumerate(note):
        body.append(_text(x, y + 76 + 17 * j, line, "small muted"))
    return "".join(body)


def _legend(y: float) -> str:
    body, x = [], 10
    for name, color in COLORS.items():
        if name == "ids":
            continue
        label = "FP8 (e4m3)" if name == "e4m3" else name.upper()
        body.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{color}"/>')
        body.append(_text(x + 18, y, label, "small"))
        x += 40 + 7 * len(label)
    body.append(
        _text(x + 10, y, "R x C: elements that share a scale, rows x columns", "small muted")
    )
    return "".join(body)
