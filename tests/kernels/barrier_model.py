"""Runs the source of warp-specialised kernels in Python and tries every schedule of their barriers.

`recording` puts stand-ins for Gluon into a kernel's module, so that its own functions, called with
integers, leave the list of what each role waits for, signals, reads and writes. `explore` walks every
interleaving of the roles' warps and of the copy engine. As in the hardware, a wait for a parity passes
as soon as the current phase has the other one; a thread barrier stands before every arrival and
between an expectation and its copy, where Triton 3.6 puts one.
"""

import contextlib
import itertools
from collections import defaultdict
from random import Random
from types import SimpleNamespace

WARPS = 2
"""Of a warp group: one that signals and one that lags."""


class Value:
    """A tensor of which nothing matters."""

    def _same(self, *_, **__):
        return self

    __call__ = __getattr__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = _same
    __mul__ = __rmul__ = __neg__ = __lt__ = __eq__ = __gt__ = __and__ = _same
    __hash__ = object.__hash__


class Memory(Value):
    """Integers in global memory."""

    def __init__(self, values, at=0):
        self.values, self.at = values, at

    def __add__(self, offset):
        return Memory(self.values, self.at + int(offset))


class Number(int):
    """A scalar of the kernel."""

    def to(self, *_):
        return self


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "xor"):
    _of_int = getattr(int, f"__{_name}__")

    def _method(self, other, _of_int=_of_int):
        result = _of_int(self, other)
        return result if result is NotImplemented else Number(result)

    setattr(Number, f"__{_name}__", _method)


class Shared:
    """A buffer or barrier, or one of a row of them."""

    def __init__(self, tape, name):
        self.tape, self.name = tape, name

    def index(self, i):
        return Shared(self.tape, f"{self.name}{i}")

    def slice(self, *_, **__):
        return self

    permute = slice

    def load(self, *_):
        self.tape.append(("read", self.name))
        return Value()

    def store(self, *_):
        self.tape.append(("write", self.name))


def recording(tape, pid, programs):
    """(gl, mbarrier, tma, async_copy, ...) that write down what a role does."""

    def mma(a, b, acc, **_):
        tape.append(("mma", [x.name for x in (a, b) if isinstance(x, Shared)]))
        return Value()

    def mma_wait(left, deps):
        tape.append(("mma_wait", left))
        return Value() if len(deps) == 1 else deps

    def load(pointer, **_):
        if isinstance(pointer, Memory):
            assert 0 <= pointer.at < len(pointer.values), "a load out of bounds"
            return Number(pointer.values[pointer.at])
        return Value()

    def pick(choose):
        return lambda *args: (
            Value() if any(type(x) is Value for x in args) else Number(choose(*args))
        )

    gl = dict.fromkeys(
        "zeros full arange max sum exp2 fma log2 div_rn broadcast convert_layout store float32 float16 "
        "int64 SliceLayout BlockedLayout NVMMADistributedLayout".split(),
        Value(),
    )
    gl |= {
        "program_id": lambda _: pid, "num_programs": lambda _: programs, "num_warps": lambda: 4,
        "to_tensor": Number, "load": load, "static_range": range, "constexpr": Value,
        "static_assert": lambda *_: None, "thread_barrier": lambda: tape.append(("sync",)),
        "minimum": pick(min), "maximum": pick(max), "cdiv": pick(lambda a, b: -(-a // b)),
        "where": lambda c, a, b: Value() if type(c) is Value else Number(a if c else b),
    }  # fmt: skip

    def copy(desc, at, bar, target, pred=True):
        if pred:
            tape.append(("copy", bar.name, target.name, desc.block_type.nbytes, tuple(at), desc))

    def expect(bar, size, pred=True):
        if pred:
            tape.append(("expect", bar.name, size))

    return {
        "gl": SimpleNamespace(**gl),
        "mbarrier": SimpleNamespace(
            wait=lambda bar, parity: tape.append(("wait", bar.name, int(parity))),
            arrive=lambda bar, count: tape.append(("arrive", bar.name)),
            expect=expect,
        ),
        "tma": SimpleNamespace(async_copy_global_to_shared=copy),
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=lambda to, _: tape.append(("scatter", to.name)),
            mbarrier_arrive=lambda bar, **_: tape.append(("scattered_all", bar.name)),
        ),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": mma,
        "warpgroup_mma_wait": mma_wait,
    }


@contextlib.contextmanager
def plain_functions(modules, names):
    """`modules` with `names` in them and their jitted functions as plain ones."""
    saved = [(m, dict(vars(m))) for m in modules]
    try:
        for module in modules:
            for key, value in list(vars(module).items()):
                if key in names:
                    setattr(module, key, names[key])
                elif hasattr(value, "fn") and value.__module__.startswith("samebit"):
                    setattr(module, key, value.fn)
        yield
    finally:
        for module, old in saved:
            vars(module).update(old)


class Warp:
    """Steps of one warp, and what it reads and writes before each: (buffer, version, writes)."""

    def __init__(self, tape, group, part):
        self.group, self.part = group, part
        self.steps, self.active = [], [[]]
        self._open, self._flights, self._scattered = [], [], []
        self._reads, self._writes = defaultdict(int), defaultdict(int)
        for kind, *rest in tape:
            getattr(self, f"_{kind}")(*rest)

    def _step(self, *what):
        self.steps.append(what)
        self.active.append([*self._open, *itertools.chain(*self._flights)])

    def _seen(self, name):
        name, _, version = name.partition(":")
        self._reads[name] += 1
        return name, int(version or self._writes[name] or self._reads[name]), False

    def _begin(self, access):
        self._open.append(access)
        self.active[-1].append(access)

    def _read(self, name):
        self._begin(self._seen(name))

    def _write(self, name):
        self._writes[name] += 1
        self._begin((name, self._writes[name], True))

    def _scatter(self, name):
        self._write(name)
        self._scattered.append(name)

    def _scattered_all(self, bar):
        self._open = [access for access in self._open if access[0] not in self._scattered]
        self._step("scattered", bar, tuple(self._scattered))
        self._scattered = []

    def _mma(self, names):
        self._flights.append([self._seen(name) for name in names])
        self.active[-1] += self._flights[-1]

    def _mma_wait(self, left):
        del self._flights[: max(len(self._flights) - left, 0)]

    def _sync(self):
        self._open = []
        self._step("sync")

    def _wait(self, bar, parity):
        self._step("wait", bar, parity)

    def _expect(self, bar, size):
        if not self.part:
            self._step("expect", bar, size)

    def _arrive(self, bar):
        self._sync()
        if not self.part:
            self._step("arrive", bar)

    def _copy(self, bar, name, size, *_):
        self._sync()
        name, _, version = name.partition(":")
        self._writes[name] = int(version or self._writes[name] + 1)
        if not self.part:
            self._step("copy", bar, name, size, self._writes[name])


class Model:
    """Warps, barriers and copies. A state: (step of each warp, copies under way, (phase, arrivals and
    bytes that are missing) of each barrier, version of each buffer by the warp that wrote its part)."""

    def __init__(self, groups, counts):
        self.warps = [
            Warp(tape, g, part) for g, (tape, n) in enumerate(groups) for part in range(n)
        ]
        self.teams = [
            [i for i, w in enumerate(self.warps) if w.group == g] for g in range(len(groups))
        ]
        steps = [step for w in self.warps for step in w.steps]
        self.names = sorted({step[1] for step in steps if step[0] != "sync"})
        self.full = [next(n for k, n in counts.items() if x.startswith(k)) for x in self.names]
        buffers = {a[0] for w in self.warps for accesses in w.active for a in accesses}
        buffers |= {step[2] for step in steps if step[0] == "copy"}
        held = tuple((name, (0,) * WARPS) for name in sorted(buffers))
        at = (0,) * len(self.warps)
        held = self._wrote(held, [-1] * len(at), range(len(at)))
        self.start = at, frozenset(), tuple((0, n, 0) for n in self.full), held

    def _settle(self, bars, name, arrivals, size):
        i = self.names.index(name)
        phase, left, missing = bars[i]
        left, missing = left - arrivals, missing + size
        assert left >= 0, f"{name}: too many arrivals"
        if left == 0 and missing == 0:
            phase, left = phase + 1, self.full[i]
        return (*bars[:i], (phase, left, missing), *bars[i + 1 :])

    @staticmethod
    def _fill(held, name, parts, version):
        return tuple(
            (n, tuple(version if p in parts else v for p, v in enumerate(vs)) if n == name else vs)
            for n, vs in held
        )

    def _wrote(self, held, at, which):
        """`held` with what these warps write once they have moved on."""
        for i in which:
            for name, version, writes in self.warps[i].active[at[i] + 1]:
                if writes:
                    held = self._fill(held, name, [self.warps[i].part], version)
        return held

    def _check(self, state):
        """Nothing that is read is written, and it holds what its reader wants."""
        at, flying, _, held = state
        written = {name for _, _, names, _, _ in flying for name in names}
        reads = set()
        for w, pc in zip(self.warps, at, strict=True):
            written |= {name for name, _, writes in w.active[pc] if writes}
            reads |= {(name, version) for name, version, writes in w.active[pc] if not writes}
        held = dict(held)
        for name, version in reads:
            assert name not in written, f"{name} is read while it is written"
            assert set(held[name]) == {version}, f"{name}: {held[name]}, not {version}"

    def _may(self, i, at, bars):
        """Whether warp i can take its next step; the first of a group takes a thread barrier for all."""
        if at[i] == len(self.warps[i].steps):
            return False
        kind, *rest = self.warps[i].steps[at[i]]
        if kind == "wait":
            return bars[self.names.index(rest[0])][0] & 1 != rest[1]
        team = self.teams[self.warps[i].group]
        following = [self.warps[j].steps[at[j] : at[j] + 1] for j in team]
        return kind != "sync" or (i == team[0] and all(x == [("sync",)] for x in following))

    def _move(self, i, state):
        at, flying, bars, held = state
        w = self.warps[i]
        kind, *rest = w.steps[at[i]]
        team = self.teams[w.group]
        who = team if kind == "sync" else [i]
        held = self._wrote(held, at, who)
        if kind in ("arrive", "expect"):
            bars = self._settle(bars, rest[0], 1, sum(rest[1:]))
        elif kind == "copy":
            bar, name, size, version = rest
            assert not any(name in names for _, _, names, _, _ in flying), f"two copies to {name}"
            flying = flying | {(kind, bar, (name,), 0, (0, -size))}
            held = self._fill(held, name, range(WARPS), version)
        elif kind == "scattered":
            arrivals = self.full[self.names.index(rest[0])] // len(team)
            flying = flying | {(kind, rest[0], rest[1], w.part, (arrivals, 0))}
        return tuple(pc + (j in who) for j, pc in enumerate(at)), flying, bars, held

    def moves(self, state):
        """[(who, the state after)], once `state` is checked. A thread barrier goes alone where its
        warps have nothing under way: nobody else can tell when."""
        self._check(state)
        at, flying, bars, held = state
        able = [i for i in range(len(self.warps)) if self._may(i, at, bars)]
        for i in able:
            team = self.teams[self.warps[i].group]
            if self.warps[i].steps[at[i]][0] == "sync":
                if not any(self.warps[j].active[at[j]] for j in team):
                    return [(i, self._move(i, state))]
        left = [w.steps[pc] for w, pc in zip(self.warps, at, strict=True) if pc < len(w.steps)]
        assert able or flying or not left, f"hang: {left}"
        return [(i, self._move(i, state)) for i in able] + [
            (item[1:3], (at, flying - {item}, self._settle(bars, item[1], *item[4]), held))
            for item in flying
        ]


def explore(groups, counts, walks=0, most=1_000_000):
    """Every schedule of `groups` [(tape, warps)], or `walks` random ones with warps of any pace:
    AssertionError on a hang or a race. The number of states seen.

    counts: arrivals of each barrier, by the beginning of its name. A role's n-th read of a buffer wants
    the n-th version, or what it wrote itself last; NAME:VERSION in a tape says another.
    """
    model = Model(groups, counts)
    for seed in range(walks):
        random = Random(seed)
        pace = defaultdict(lambda random=random: 10 ** random.uniform(-3, 0))
        state = model.start
        while found := model.moves(state):
            ((_, state),) = random.choices(found, [pace[who] for who, _ in found])
            if random.random() < 0.02:
                pace.clear()
    seen = {model.start}
    todo = [] if walks else [model.start]
    while todo:
        new = {state for _, state in model.moves(todo.pop())} - seen
        seen |= new
        todo += new
        assert len(seen) < most, "too many states"
    return len(seen)
