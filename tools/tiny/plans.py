"""What is trained when: stages of row kinds, and when selection and expert rounding begin. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from batches import Part


@dataclass(frozen=True)
class Stage:
    """Parts drawn from until `until` seconds of the plan, or earlier once every accuracy in `goal` is reached."""

    until: float
    parts: list[Part]
    goal: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    total: float  # the learning rate ends here
    stages: list[Stage]
    flat: float = 0.35  # share of `total` at the full learning rate
    select_at: float = 1e9  # the indexer's top-k replaces all visible rows
    round_at: float = 1e9  # routed experts are rounded to the file's formats
    round_every: int = 4  # steps between two roundings
    balance: float = 0.002
    peak: float = 1.0
    linear: bool = False


NEAR = {"distance": (20, 600), "pairs": (4, 12), "questions": 12}
FAR = {"distance": (1000, 2600), "pairs": (6, 14), "questions": 14}
MIX = {"tools": 66.0, "chat": 12.0, "arith": 12.0, "kv": 2.0, "recall": 2.0, "text": 4.0}

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
MORE_TOOLS = {"tools": 77.0, "chat": 8.0, "arith": 9.0, "kv": 1.0, "recall": 1.0, "text": 2.0}
KINDS = {"parallel": 26, "chain": 22}
FINISH = [
    Part(0.83, "mixed", knobs={"mix": MORE_TOOLS}, tools=KINDS),
    Part(0.04, "long"),
    Part(0.03, "recall", knobs=NEAR, boost=3.0),
    Part(0.08, "recall", knobs=FAR, boost=3.0),
    Part(0.02, "kv"),
]
PLANS = {
    # The first run of 500 seconds; "finish" goes on from what it saved.
    "main": Plan(
        total=835,
        flat=0.4,
        select_at=380,
        round_at=400,
        stages=[Stage(190, LOOKUP), Stage(1e9, EVERYTHING)],
    ),
    # The second run: what is left to learn is tools; the learning rate falls along a line to its end.
    "finish": Plan(
        total=845,
        flat=500 / 845,
        peak=0.65,
        linear=True,
        select_at=0,
        round_at=0,
        round_every=8,
        stages=[Stage(1e9, FINISH)],
    ),
    "smoke": Plan(
        total=100,
        select_at=5,
        round_at=10,
        stages=[Stage(1e9, [Part(0.5, "spaced", 512, 2), Part(0.5, "mixed", 512, 2)])],
    ),
}
