"""Jet-RL's precision-flow graph: nodes are operators, edges are tensors with a precision.

A recipe is *unified* when its rollout graph is a subgraph of its training forward graph (Jet-RL
section 4.1): every operator of the sampler then sees the operands the trainer's operator sees. That
is a graph-level promise; the bit-level one is docs/numerics.md and its tests.
"""

from __future__ import annotations

from dataclasses import dataclass

from samebit.spec import Flow, Recipe

BLOCK_OPS = ("norm_attention", "qkv", "attention", "out", "norm_mlp", "gate_up", "silu_mul", "down")


@dataclass(frozen=True, order=True)
class Edge:
    """A tensor from one operator to another. `precision` includes granularity and accumulation."""

    source: str
    target: str
    tensor: str
    precision: str


def _linear_edges(flow: Flow, role: str, source: str, target: str) -> list[Edge]:
    gemm = flow.gemm(role)  # type: ignore[arg-type]
    promote = f" promote {gemm.promote}" if gemm.promote else ""
    promote += " library" if gemm.library else ""
    out = "fp32" if role == "head" else str(flow.between)
    return [
        Edge(source, role, "activation", f"{gemm.lhs}{promote}"),
        Edge("weights", role, "weight", f"{gemm.rhs}{promote}"),
        Edge(role, target, "output", out),
    ]


def graph(flow: Flow) -> frozenset[Edge]:
    """The edges of one forward: embedding, one transformer block, the head."""
    a = flow.attention
    between = str(flow.between)
    edges = [
        Edge("embedding", "residual", "hidden", str(flow.embedding)),
        Edge("residual", "norm_attention", "hidden", between),
        *_linear_edges(flow, "qkv", "norm_attention", "rotary"),
        Edge("rotary", "attention", "query", f"{a.q} block {a.kv_block} split {a.kv_split}"),
        Edge("kv_cache", "attention", "key", f"{a.kv} block {a.kv_block} split {a.kv_split}"),
        Edge("kv_cache", "attention", "value", f"{a.kv} probabilities {a.probabilities}"),
        *_linear_edges(flow, "out", "attention", "residual"),
        Edge("residual", "norm_mlp", "hidden", between),
        Edge("norm_mlp", "gate_up", "statistics", str(flow.norm)),
        *_linear_edges(flow, "gate_up", "norm_mlp", "silu_mul"),
        *_linear_edges(flow, "down", "silu_mul", "residual"),
        Edge("residual", "norm_final", "hidden", between),
        *_linear_edges(flow, "head", "norm_final", "log_prob"),
    ]
    return frozenset(edges)


def is_unified(recipe: Recipe) -> bool:
    """True when the rollout graph is a subgraph of the training forward graph.

    A library GEMM is no function of its row alone, so a flow with one is unified with nothing.
    """
    return graph(recipe.rollout) <= graph(recipe.train) and not recipe.library


def differing_edges(a: Flow, b: Flow) -> list[tuple[Edge | None, Edge | None]]:
    """Edges on which two flows differ, paired by (source, target, tensor), in graph order."""
    key = lambda e: (e.source, e.target, e.tensor)  # noqa: E731
    left, right = ({key(e): e for e in graph(f)} for f in (a, b))
    return [
        (left.get(k), right.get(k))
        for k in sorted(left.keys() | right.keys())
        if left.get(k) != right.get(k)
    ]
