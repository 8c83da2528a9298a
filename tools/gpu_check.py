"""Checks and times whole models on a CUDA device; each check prints a small table and can write JSON.

    python3 tools/gpu_check.py tiny [--bytes]                        the embedded model against the CPU: greedy texts
    python3 tools/gpu_check.py sessions [--bytes] [--file FILE]      fork, rewind, truncate, batch: bit-equal to anew
    python3 tools/gpu_check.py layers                                a few layers of Flash's widths against the CPU
    python3 tools/gpu_check.py fixtures --file FILE --fixtures DIR   logits and texts of another engine
    python3 tools/gpu_check.py speed --file FILE                     loading, prefill, decode, kernels, memory

Without a CUDA device, `--device cpu` runs the kernels in Triton's interpreter, which suits toy models only.
Exit status 0 if all is within its bars.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [str(TOOLS.parent / "src"), str(TOOLS)]

from gpu_checks.common import Report, numbers  # noqa: E402
from gpu_checks.fixtures import check_fixtures  # noqa: E402
from gpu_checks.layers import check_layers  # noqa: E402
from gpu_checks.sessions import check_sessions  # noqa: E402
from gpu_checks.speed import check_speed  # noqa: E402
from gpu_checks.texts import check_tiny  # noqa: E402

CHECKS: dict[str, Callable[[argparse.Namespace, Report], None]] = {
    "tiny": check_tiny,
    "sessions": check_sessions,
    "layers": check_layers,
    "fixtures": check_fixtures,
    "speed": check_speed,
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = made.add_subparsers(dest="check", required=True, metavar="CHECK")
    subs = {}
    for name, check in CHECKS.items():
        sub = subs[name] = kinds.add_parser(name, help=(check.__doc__ or "").split("\n")[0], description=check.__doc__)
        needed = name in ("fixtures", "speed")
        sub.add_argument("--file", type=Path, required=needed, help="the model" + ("" if needed else " (the embedded)"))
        sub.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu, where kernels are interpreted (cuda)")
        sub.add_argument("--json", type=Path, help="write the numbers here")
        sub.add_argument("--seed", type=int, default=1, help="of prompts and weights (1)")
        sub.add_argument("--budget", type=float, default=0.0, help="seconds after which no new part is begun")
    sub = subs["tiny"]
    sub.add_argument("--prompts", type=int, default=200, help="texts (200)")
    sub.add_argument("--tokens", type=int, default=48, help="most tokens of a text (48)")
    sub.add_argument("--batches", type=numbers, default=[1, 16], help="sessions that decode together (1,16)")
    sub.add_argument("--tie", type=float, default=1e-2, help="logits this near may change places (0.01)")
    sub.add_argument("--bytes", action="store_true", help="also with activations in bytes, as large models have them")
    sub.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="for the CPU; 0: none")
    sub.add_argument("--context", type=int, default=2048)
    sub = subs["sessions"]
    sub.add_argument("--bytes", action="store_true", help="also with activations in bytes, as large models have them")
    sub.add_argument("--length", type=int, default=600, help="tokens of the prompt (600)")
    sub.add_argument("--steps", type=int, default=20, help="tokens that are decoded (20)")
    sub.add_argument("--chunk", type=int, default=256)
    sub.add_argument("--batch", type=int, default=12)
    sub = subs["layers"]
    sub.add_argument("--layers", type=int, default=4, help="up to 8 (4)")
    sub.add_argument("--experts", type=int, default=16)
    sub.add_argument("--vocab", type=int, default=4096)
    sub.add_argument("--top-k", type=int, default=32, help="rows that the indexer chooses (32)")
    sub.add_argument("--tokens", type=int, default=280, help="of the prefill (280)")
    sub.add_argument("--decode", type=int, default=10, help="tokens that are decoded (10)")
    sub.add_argument("--recipes", default="q2,q4,mxfp4", help="types of experts: q2, q4, mxfp4")
    sub.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 4))
    sub = subs["fixtures"]
    sub.add_argument("--fixtures", type=Path, required=True, help="folder of the other engine's logits and texts")
    sub.add_argument("--name", default="flash-q2-seed1", help="how its files begin (flash-q2-seed1)")
    sub.add_argument("--cases", default="", help="beginnings of names, comma-separated; all without it")
    sub.add_argument("--chunk", type=int, default=4096)
    sub.add_argument("--tie", type=float, default=3.0, help="near-tied: so many times the rms difference (3)")
    sub = subs["speed"]
    sub.add_argument("--contexts", default="2048,4096,32768")
    sub.add_argument("--chunk", type=int, default=4096, help="of all but the comparison of chunks (4096)")
    sub.add_argument("--chunks", default="512,1024,2048,4096,8192", help="sizes to compare")
    sub.add_argument("--prefill-tokens", type=int, default=4096, help="prompt for the chunk sizes (4096)")
    sub.add_argument("--first-token", type=int, default=4096, help="prompt for the time to the first token (4096)")
    sub.add_argument("--steps", type=int, default=64, help="tokens that are decoded (64)")
    sub.add_argument("--batch", type=int, default=16)
    sub.add_argument("--batch-context", type=int, default=4096, help="one of the contexts (4096)")
    sub.add_argument("--expert-layout", choices=("auto", "a", "b"), default="auto", help="as for ds4 (auto)")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run a check; its exit status."""
    from ds4.engine.device import choose
    from ds4.errors import Ds4Error
    from ds4.process import wait_passively

    options = parser().parse_args(argv)
    wait_passively()
    report = Report(options)
    try:
        choose(options.device)  # before anything is begun
        CHECKS[options.check](options, report)
    except Ds4Error as problem:
        report.line(f"gpu_check: {problem}")
        report.judge(False)
    except BaseException:
        report.judge(False)
        report.save()
        raise
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
