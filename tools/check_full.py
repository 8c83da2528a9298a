"""Evaluates a few tokens on a full-size model file and compares the logits with those of another engine.

    python tools/check_full.py --file MODEL.gguf --reference REFERENCE.npz

REFERENCE.npz holds `tokens` (the complete input, ids [n]) and `logits` (after the last of them, [vocab]). It belongs
to the bytes of one file; `ds4 -m MODEL.gguf -p ... --dump-logits FILE.npz` writes such a file too. Without
--reference only time and memory are measured.

Exit status 0 if the cosine is at least --cosine and the anonymous memory stays below --memory. Anonymous memory is what
the process holds beyond the mapped file (RssAnon of Linux), sampled every 20 ms.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

# The template around "Hello" in the V4 vocabulary, thinking off.
DEFAULT_TOKENS = [0, 128803, 19923, 128804, 128822]


class MemoryPeak:
    """The largest RssAnon seen while the block runs, in bytes; 0 where /proc does not tell."""

    def __init__(self, interval: float = 0.02) -> None:
        self.peak = 0
        self._interval = interval
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, anonymous_bytes())
            if self._end.wait(self._interval):
                return


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    for line in status.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True)
class Comparison:
    """How two vectors of logits differ; divergence in nats, of the reference from ours."""

    cosine: float
    max_difference: float
    rms_difference: float
    kl_divergence: float
    same_top_1: bool
    shared_top_20: int


def compare(logits: np.ndarray, reference: np.ndarray) -> Comparison:
    """Compare logits [vocab] with a reference; raises ValueError if the sizes differ or a value is not finite."""
    a, b = logits.astype(np.float64), reference.astype(np.float64)
    if a.shape != b.shape:
        raise ValueError(f"{a.shape[0]} logits against {b.shape[0]} of the reference: not the same model")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("some logits are not finite")
    p, q = _log_softmax(b), _log_softmax(a)
    top_a, top_b = np.argsort(-a, kind="stable")[:20], np.argsort(-b, kind="stable")[:20]
    return Comparison(
        cosine=float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))),
        max_difference=float(np.abs(a - b).max()),
        rms_difference=float(np.sqrt(np.mean((a - b) ** 2))),
        kl_divergence=float(np.sum(np.exp(p) * (p - q))),
        same_top_1=bool(top_a[0] == top_b[0]),
        shared_top_20=len(set(top_a.tolist()) & set(top_b.tolist())),
    )


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def main(argv: list[str] | None = None) -> int:
    """Run the check; 0 if it passes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--file", required=True, type=Path, help="the model file")
    parser.add_argument("--reference", type=Path, help="npz with tokens and logits")
    parser.add_argument("--cosine", type=float, default=0.98, help="least cosine that passes (0.98)")
    parser.add_argument("--memory", type=float, default=4.0, help="most anonymous memory that passes, in GiB (4)")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    args = parser.parse_args(argv)

    tokens, expected = DEFAULT_TOKENS, None
    if args.reference is not None:
        with np.load(args.reference, allow_pickle=False) as stored:
            tokens, expected = stored["tokens"].tolist(), stored["logits"]

    with MemoryPeak() as memory:
        import ds4
        from ds4.process import wait_passively

        wait_passively()

        start = time.perf_counter()
        try:
            engine = ds4.load(args.file, config=ds4.EngineConfig(threads=args.threads))
            loaded = time.perf_counter()
            session = engine.session()
            session.sync(tokens)
            logits = session.logits.numpy()
        except ds4.Ds4Error as error:
            print(f"check-full: {error}", file=sys.stderr)
            return 1
        evaluated = time.perf_counter()

    numbers: dict[str, object] = {
        "tokens": len(tokens),
        "load_seconds": round(loaded - start, 2),
        "evaluate_seconds": round(evaluated - loaded, 2),
        "anonymous_gib": round(memory.peak / (1 << 30), 3),
    }
    passed = memory.peak < args.memory * (1 << 30)
    if expected is not None:
        difference = compare(logits, expected)
        numbers |= asdict(difference)
        passed = passed and difference.cosine >= args.cosine
    print(json.dumps(numbers) if args.json else "\n".join(f"{k:18} {v}" for k, v in numbers.items()))
    print(f"check-full: {'passed' if passed else 'FAILED'}", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
