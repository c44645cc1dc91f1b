"""FLOPs of a training step against hand-counted products."""

import numpy as np

from samebit.models.config import ModelConfig
from samebit.train.flops import attention_pairs, forward_flops, peak_of, training_flops
from samebit.types import Group, Prompt, Sample

MODEL = ModelConfig(
    family="llama", hidden=8, intermediate=16, layers=3, heads=2, kv_heads=1, head_dim=4,
    vocab_size=50, tokenizer_size=50, rope_theta=1e4, rms_eps=1e-6, tied=True, max_position=64,
)  # fmt: skip


def group(prompt: int, *lengths: int) -> Group:
    samples = tuple(
        Sample("p", i, (1,) * n, np.zeros(n, np.float32), np.zeros(n, np.int32), "stop")
        for i, n in enumerate(lengths)
    )
    return Group(Prompt("p", (2,) * prompt, ""), samples, (0.0,) * len(lengths))


def test_a_forward_counts_every_product_twice():
    block = 8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 16  # qkv, out, gate, up and down of one row
    assert forward_flops(MODEL, rows=5, pairs=0, predicted=0) == 3 * 2 * 5 * block
    assert forward_flops(MODEL, rows=0, pairs=7, predicted=0) == 3 * 2 * 2 * 8 * 7  # QK and PV
    assert forward_flops(MODEL, rows=0, pairs=0, predicted=4) == 2 * 4 * 50 * 8


def test_a_group_s_prompt_is_counted_once():
    # prompt 3: 1 + 2 + 3 pairs; the sample of 3 feeds 2 rows: on the prompt 2 * 3, on itself 1 + 2
    assert attention_pairs(group(3, 3)) == 6 + 6 + 3
    assert attention_pairs(group(3, 3, 1)) == 6 + 6 + 3
    both = training_flops(MODEL, [group(3, 3, 1)])
    assert both == 3 * forward_flops(MODEL, rows=5, pairs=15, predicted=4)


def test_a_peak_is_stated_for_the_devices_the_kernels_run_on():
    assert peak_of("NVIDIA H200") == 989e12 == peak_of("NVIDIA H100 80GB HBM3")
    assert peak_of("some other card") is None
