"""The barriers of the warp-specialised kernels, in every schedule of their warps and copies."""

import itertools
from types import SimpleNamespace

import pytest

from samebit.kernels import _gemm_hopper, sample_hopper
from samebit.kernels import attention_decode_codes as codes
from samebit.kernels import attention_decode_feed as feed
from tests.kernels.barrier_model import (
    WARPS,
    Memory,
    Number,
    Shared,
    Value,
    explore,
    plain_functions,
    recording,
)

KB, SLOTS, SPLIT_BLOCKS = 128, 4, 2
DECODE = {"ready": 1, "free": 1, "s_ready": 128, "v16_ready": 1, "v16_free": 1}


def boxes(kind, size):
    """Descriptors of whole, half and quarter blocks."""
    return tuple(
        SimpleNamespace(kind=kind, block_type=SimpleNamespace(nbytes=size >> i, shape=[KB >> i, 1]))
        for i in range(3)
    )


def decode(contexts, G, splits, finished, pid, programs, order=None):
    """(consumer's tape, feeder's tape, blocks as the consumer walks them) of one program."""
    chunks = -(-splits // finished)
    width = splits * SPLIT_BLOCKS
    table = Memory([100 * i + j for i in range(len(contexts)) for j in range(width)])
    lens, ranks = Memory(contexts), Memory(order or contexts)
    items = Number(len(contexts) * G * chunks)
    tapes, blocks = ([], []), []
    for tape in tapes:
        smem = {n: Shared(tape, n) for n in ("q", "ring", "v16", "ks", "vs", "p", "p16")}
        bars = tuple(Shared(tape, n) for n in DECODE)
        names = recording(tape, pid, programs)
        names |= {"sum_layout": lambda *_: Value(), "_store_result": lambda *_: None}
        ordered = order is not None
        with plain_functions((codes, feed), names):
            block = codes._block

            def noted(count, b, end, *rest, block=block):
                blocks.append((int(b), int(end)))
                return block(count, b, end, *rest)

            codes._block = noted
            if tape is tapes[0]:
                codes._consume(
                    (
                        (tuple(smem.values()), bars),
                        (Value(), Value(), (Value(),) * 4, *(Value(),) * 4),
                        (lens, ranks, items, Number(chunks), Number(splits), Value()),
                    ),
                    2 * G, G, 8, 128, KB, SPLIT_BLOCKS, finished, SLOTS, ordered, False,
                )  # fmt: skip
            else:
                data = tuple(smem[n] for n in ("ring", "v16", "ks", "vs"))
                walked = (table, width, lens, ranks, items, Number(chunks))
                strides = ((1000, 1, 0), (1000, 1, 0), (0,) * 6)
                feed.feed_codes(
                    (
                        ((boxes("k", 16384), boxes("v", 16384)), (Value(), Value())),
                        data, bars, walked, strides,
                    ),
                    G, 128, KB, KB, finished * SPLIT_BLOCKS, SLOTS, ordered,
                )  # fmt: skip
    return *tapes, blocks


def wanted(contexts, G, splits, finished, pid, programs, order):
    """(sequence, head, block) of one program, from the definition of an item."""
    chunks = -(-splits // finished)
    out = []
    for turn in itertools.count():
        if turn * programs >= len(contexts) * G * chunks:
            return out
        item = turn * programs + (programs - 1 - pid if turn % 2 else pid)
        if item >= len(contexts) * G * chunks:
            continue
        rank, chunk = divmod(item // G, chunks)
        index = order[rank] if order else rank
        step = finished * SPLIT_BLOCKS
        last = min((chunk + 1) * step, -(-contexts[index] // KB))
        out += [(index, item % G, block) for block in range(chunk * step, last)]


ITEMS = [
    # contexts, G, splits, finished: idle rows, whole blocks, several chunks with empty ones between
    ([0], 1, 1, 1),
    ([1], 1, 1, 1),
    ([128], 1, 1, 1),
    ([129, 0, 128, 0, 0, 384, 1], 1, 2, 2),
    ([640, 0, 130, 256, 0], 2, 3, 1),
    ([0, 0, 0], 3, 4, 2),
    ([1024, 300, 0, 512, 513, 0, 1], 3, 4, 2),
]


@pytest.mark.parametrize("case", ITEMS)
def test_both_roles_of_decode_walk_the_same_blocks(case):
    contexts, G, splits, finished = case
    ranks = sorted(range(len(contexts)), key=lambda i: -contexts[i])
    for programs, order in itertools.product((1, 2, 3, 5), (None, ranks)):
        for pid in range(min(programs, len(contexts) * G * -(-splits // finished))):
            args = (contexts, G, splits, finished, pid, programs, order)
            _, tape, blocks = decode(*args)
            expected = wanted(*args)
            assert blocks == [(b, contexts[i]) for i, _, b in expected]
            for kind in "kv":
                copies = [x for x in tape if x[0] == "copy" and x[5].kind == kind]
                rows = [min(contexts[i] - b * KB, KB) for i, _, b in expected]
                fit = [next(s for s in (32, 64, 128) if r <= s) for r in rows]
                assert [x[5].block_type.shape[0] for x in copies] == fit
                assert [x[4][0] for x in copies] == [
                    1000 * (100 * i + b) + head for i, head, b in expected
                ]


@pytest.mark.parametrize("blocks", [1, 2])
def test_every_schedule_of_decode_ends_with_the_right_data(blocks):
    consumer, feeder, _ = decode([128 * blocks], 1, 5, 5, 0, 1)
    explore([(consumer, WARPS), (feeder, WARPS)], DECODE)


@pytest.mark.parametrize("case", [([128 * 9], 1, 5, 5), *ITEMS[3:5]])
def test_schedules_of_decode_with_laggards_end_with_the_right_data(case):
    consumer, feeder, _ = decode(*case, 0, 1)
    explore([(consumer, WARPS), (feeder, WARPS)], DECODE, walks=60)


def sampler(T, tiles, steps, stages, pid=0, programs=1, drawn=None):
    """Tapes of both consumers and the producer of one program; `drawn`: what is told of each strip."""
    tapes = []
    for which in (0, 1, None):
        tape = []
        names = recording(tape, pid, programs)

        def draw_strip(p, acc, token, vocab_tile, which=which):
            if drawn is not None:
                drawn.append((which, int(token), int(vocab_tile)))

        names["_draw_strip"] = draw_strip
        sizes = ("STRIP", "TOKENS", "VOCAB", "BLOCK_K")
        names |= {"STAGES": stages, **{n: getattr(sample_hopper, n).value for n in sizes}}
        bufs = {n: Shared(tape, n) for n in ("hidden", "weight", "full", "empty", "turn")}
        desc = [SimpleNamespace(block_type=SimpleNamespace(nbytes=n)) for n in (8192, 16384)]
        p = SimpleNamespace(
            T=Number(T), steps=Number(steps), vocab_tiles=Number(tiles), hidden_desc=desc[0],
            weight_desc=desc[1], hidden_bufs=bufs["hidden"], weight_bufs=bufs["weight"],
            **{n: bufs[n] for n in ("full", "empty", "turn")},
        )  # fmt: skip
        with plain_functions((sample_hopper, _gemm_hopper), names):
            if which is None:
                sample_hopper._produce(p)
            else:
                sample_hopper._consume(p, which)
        tapes.append(tape)
    return tapes


def draws(tapes, stages, steps, walks=0):
    """Explores a sampler; what a stage holds and who reads it is told by the number of its step."""
    marked = []
    for role, tape in enumerate(tapes):
        seen, ops = -1, []
        for kind, *rest in tape:
            seen += kind == "wait" and rest[0].startswith(("full", "empty"))
            step = seen if role == 2 else (2 * (seen // steps) + role) * steps + seen % steps
            version = step // stages + 1
            if kind == "mma":
                rest = [[f"{name}:{version}" for name in rest[0]]]
            elif kind == "copy":
                rest[1] = f"{rest[1]}:{version}"
            ops.append((kind, *rest))
        marked.append((ops, 1 if role == 2 else WARPS))
    return explore(marked, {"full": 1, "empty": 1, "turn": 1}, walks)


@pytest.mark.parametrize("T", [65, 128, 193, 256, 300, 640, 2048])
def test_every_strip_is_drawn_once_from_its_own_copies(T):
    for tiles, programs in ((1, 1), (1, 5), (2, 3), (5, 4), (7, 16)):
        every = []
        for pid in range(min(programs, -(-T // 128) * tiles)):
            drawn = []
            *_, producer = sampler(T, tiles, 1, 2, pid, programs, drawn)
            copied = [op for op in producer if op[0] == "copy"]
            hidden = [op[4][0] for op in copied if op[2].startswith("hidden")]
            weight = [op[4][0] for op in copied if op[2].startswith("weight")]
            starts = [token for token in hidden if token % 128 == 0]
            tiles_of_program = list(zip(starts, weight, strict=True))
            for which in (0, 1):
                places = [(t // 128 * 128, v * 128) for w, t, v in drawn if w == which]
                assert list(dict.fromkeys(places)) == tiles_of_program[which::2]
            assert sorted(hidden) == sorted(token for _, token, _ in drawn)
            every += [(token, v) for _, token, v in drawn]
        assert sorted(every) == sorted(itertools.product(range(0, T, 64), range(tiles)))


@pytest.mark.parametrize("shape", [(128, 5, 1, 2), (128, 4, 3, 2), (70, 3, 4, 3), (190, 2, 3, 2)])
def test_every_schedule_of_the_sampler_ends_with_the_right_data(shape):
    draws(sampler(*shape), shape[3], shape[2])


def test_the_model_sees_a_missing_barrier():
    consumer, feeder, _ = decode([128 * 5], 1, 5, 5, 0, 1)
    for left_out in ("free", "v16_free", "v16_ready", "s_ready", "ready"):
        tapes = [
            [op for op in tape if not (op[0] == "wait" and op[1].startswith(left_out))]
            for tape in (consumer, feeder)
        ]
        with pytest.raises(AssertionError):
            explore([(tapes[0], WARPS), (tapes[1], WARPS)], DECODE)
    # Without turns a consumer may wait for a stage two phases ahead and pass at once.
    tapes = [[op for op in t if "turn" not in str(op[1:2])] for t in sampler(128, 4, 3, 2)]
    with pytest.raises(AssertionError):
        draws(tapes, 2, 3)
