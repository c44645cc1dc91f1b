"""Segment tables: prefixes, work lists and refusals, worked by hand."""

import pytest
import torch

from tests.kernels.attention_oracle import SEGMENTS, packed

from samebit.kernels.attention_layout import rows_like  # isort: skip


def test_build_lists_work_and_sizes():
    layout = packed(SEGMENTS)
    assert layout.segments.tolist() == [list(row) for row in SEGMENTS]
    assert (layout.num_tokens, layout.max_length, layout.max_keys) == (288, 130, 167)
    # Key counts 167 (tokens 0-127 then 128 on: 165 and 167), 87, 70, 38, 37.
    assert [row[:5] for row in layout.forward_tiles.tolist()] == [
        [88, 130, 0, 37, 128],
        [88, 130, 0, 37, 0],
        [37, 50, 0, 37, 0],
        [218, 70, 0, 0, 0],
        [87, 1, 0, 37, 0],
        [0, 37, 0, 0, 0],
    ]
    # The prompt's own part and one per sample, 37 rows each; the others write directly.
    assert sorted(layout.backward_items.tolist()) == [
        [0, 0, 1, 0],
        [0, 1, 1, 37],
        [0, 2, 1, 74],
        [0, 3, 1, 111],
        [1, 1, 1, -1],
        [2, 2, 1, -1],
        [3, 3, 1, -1],
        [4, 4, 1, -1],
    ]
    assert layout.backward_items.tolist()[0][1] == 3, "130 queries come first"
    assert layout.reduce_items.tolist() == [[0, 0, 4]]
    assert layout.num_partial_rows == 4 * 37


def test_rows_outside_every_segment_are_zero_not_garbage():
    layout = packed([(0, 3, 0, 0), (5, 2, 0, 0)])
    assert (layout.num_rows, layout.num_tokens) == (5, 7)
    assert rows_like(torch.ones(7, 2), layout, torch.float32).tolist() == [[0.0, 0.0]] * 7


def test_samples_per_item_groups_consecutive_samples():
    layout = packed(SEGMENTS, samples_per_item=2)
    assert sorted(row for row in layout.backward_items.tolist() if row[0] == 0) == [
        [0, 0, 1, 0],
        [0, 1, 2, 37],
        [0, 3, 1, 74],
    ]
    assert layout.reduce_items.tolist() == [[0, 0, 3]]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "segments is empty"),
        ([(0, 0, 0, 0)], r"lengths must be at least 1"),
        ([(0, 8, 0, 0), (8, 4, 0, 7)], r"prefix \(0, 7\), which is not a whole segment"),
        ([(0, 8, 0, 0), (8, 4, 0, 8), (12, 4, 8, 4)], "not a whole segment without a prefix"),
        ([(0, 8, 0, 0), (8, 4, 0, 8), (12, 4, 0, 0), (16, 4, 0, 8)], "must follow the other"),
    ],
)
def test_bad_tables_are_refused(segments, message):
    with pytest.raises(ValueError, match=message):
        packed(segments)
