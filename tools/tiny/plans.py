"""What is trained when: stages of row kinds, and when selection and expert rounding begin. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from batches import Part


@dataclass(frozen=True)
class Stage:
    """Parts drawn from until `until` seconds of the plan, or earlier once every accuracy in `goal` is reached."""

    until: float
    parts: list[Part]
    goal: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """One run. `held_out` are the parts whose unseen rows are scored now and then."""

    total: float  # the learning rate ends here
    stages: list[Stage]
    ends: float = 0.0  # the run ends here (0: at `total`)
    flat: float = 0.35  # share of `total` at the full learning rate
    select_at: float = 1e9  # the indexer's top-k replaces all visible rows
    round_at: float = 1e9  # routed experts are rounded to the file's formats
    round_every: int = 4  # steps between two roundings
    balance: float = 0.002
    peak: float = 1.0
    linear: bool = False
    floor: float = 0.02  # factor of the learning rate at the end of a linear fall
    held_out: dict[str, Part] = field(default_factory=dict)

    def lasting(self, total: float) -> Plan:
        """The same plan over another time."""
        part = total / self.total

        def scaled(time: float) -> float:
            return time * part if time < 1e9 else time

        stages = [replace(stage, until=scaled(stage.until)) for stage in self.stages]
        times = {"select_at": scaled(self.select_at), "round_at": scaled(self.round_at), "ends": scaled(self.ends)}
        return replace(self, total=total, stages=stages, **times)


NEAR = {"distance": (20, 600), "pairs": (4, 12), "questions": 12}
FAR = {"distance": (1000, 2600), "pairs": (6, 14), "questions": 14}
MIX = {"tools": 66.0, "chat": 12.0, "arith": 12.0, "copy": 4.0, "kv": 2.0, "recall": 2.0, "text": 4.0}

LOOKUP = [
    Part(0.2, "spaced"),
    Part(0.15, "kv"),
    Part(0.2, "recall", knobs=NEAR, boost=3.0),
    Part(0.2, "recall", knobs=FAR, boost=3.0),
    Part(0.25, "mixed", knobs={"mix": MIX}),
]
EVERYTHING = [
    Part(0.6, "mixed", knobs={"mix": MIX}),
    Part(0.08, "long"),
    Part(0.08, "recall", knobs=NEAR, boost=3.0),
    Part(0.14, "recall", knobs=FAR, boost=3.0),
    Part(0.05, "kv"),
    Part(0.05, "spaced"),
]

# The later runs: rows that hold a fact 3,100 tokens away, more of what fails (parallel and chained calls, values that
# must be copied), less of what has no right answer (plain text: most of the gradient, nothing that is measured).
LENGTH, ROWS = 3584, 10
FARTHER = {"distance": (900, 3150), "pairs": (6, 14), "questions": 14, "value_weight": 3.0}
NEARER = {**NEAR, "value_weight": 2.0}
MORE_TOOLS = {"tools": 74.0, "chat": 7.0, "arith": 7.0, "copy": 12.0, "kv": 2.0, "recall": 1.0, "text": 1.0}
KINDS = {"random": 36, "known": 20, "parallel": 28, "chain": 26, "none": 9, "agent": 8}


def later(mixed: float, long: float, near: float, far: float, kv: float, wild: tuple[float, ...]) -> list[Part]:
    """Parts of a later run by their shares of the steps; `wild` as in the generator, less of it where facts are far."""
    quiet = {"text_weight": 0.03, "wild": wild}
    rare = {"text_weight": 0.03, "wild": (0.0, 0.0, 0.0, 0.3)}
    return [
        Part(mixed, "mixed", LENGTH, ROWS, {"mix": MORE_TOOLS, **quiet}, tools=KINDS),
        Part(long, "long", LENGTH, ROWS, rare),
        Part(near, "recall", LENGTH, ROWS, {**NEARER, **quiet}),
        Part(far, "recall", LENGTH, ROWS, {**FARTHER, **rare}),
        Part(kv, "kv", LENGTH, ROWS, quiet),
    ]


HELD_OUT = {
    **{
        kind: Part(1, "tools", LENGTH, ROWS, tools={k: int(k == kind) for k in KINDS})
        for kind in ("random", "known", "parallel", "chain")
    },
    "copy": Part(1, "copy", LENGTH, ROWS),
    "far": Part(1, "recall", LENGTH, ROWS, {**FARTHER, "distance": (1500, 3000)}),
}
FINISH = Plan(
    total=540,
    flat=0.45,
    peak=0.6,
    linear=True,
    floor=0.01,
    select_at=0,
    round_at=0,
    round_every=8,
    stages=[Stage(1e9, later(0.74, 0.05, 0.03, 0.16, 0.02, (0.0, 0.1, 0.3, 0.7)))],
    held_out=HELD_OUT,
)
TINY_MIX = {"mix": {"tools": 60.0, "chat": 20.0, "copy": 20.0}}
SMOKE = Plan(
    total=60,
    select_at=0,
    round_at=0,
    stages=[Stage(1e9, [Part(0.3, "spaced", 512, 2), Part(0.7, "mixed", 512, 2, TINY_MIX)])],
    held_out={"copy": Part(1, "copy", 512, 2)},
)
PLANS = {
    # From the initial values; the learning rate is still high at its end, after 500 seconds.
    "main": Plan(
        total=835,
        ends=500,
        flat=0.4,
        select_at=380,
        round_at=400,
        stages=[Stage(190, LOOKUP), Stage(1e9, EVERYTHING)],
        held_out={k: replace(p, length=3072, rows=12) for k, p in HELD_OUT.items()},
    ),
    # Each of these goes on from saved weights and ends with a learning rate near 0, so its result can ship.
    "finish": FINISH,
    "polish": replace(
        FINISH, flat=0.3, peak=0.45, stages=[Stage(1e9, later(0.78, 0.04, 0.03, 0.13, 0.02, (0.0, 0.0, 0.2, 0.5)))]
    ),
    # Any machine, a few steps: the same code on rows of 512 tokens.
    "smoke": SMOKE,
}
