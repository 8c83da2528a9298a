"""Real clients against a server of this machine: each reads two files by its tools and answers from them.

    make test-clients                                          installs them from npm, and runs all
    .venv/bin/python tools/client_check.py claude codex        some, with a scripted model
    .venv/bin/python tools/client_check.py --variants          the same agents over other APIs, and with more thinking
    .venv/bin/python tools/client_check.py --tiny pi           with the model that comes with ds4
    .venv/bin/python tools/client_check.py --keep FOLDER pi    leaves traces and output there

The model's script makes the right calls for the tools that the client declares in a first conversation without calls.
The trace has to show that each further request continues the live state (99 % of it at least). Where the system has
`unshare`, all runs in a network of its own that ends at this machine, and a name that a client looks up counts as a
mistake. Returns 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from client_checks import loops, network
from client_checks.setups import CLIENTS, NPM, VARIANTS, Client, Place, command, install
from load import read, server
from script_lines import answer, script

from ds4.errors import Ds4Error

QUESTION = "Read first.txt, then the file that it names, and tell me the launch code."
SIMPLE = "Please read the file notes.txt."
AGAIN = "Tell me the code once more."
CONTEXT = 131_072
LIMIT = 300.0
"""Seconds that a client may take for one command."""


@dataclass
class Result:
    """What came of one client: its requests, what was wrong, what is worth knowing, and names that it looked up."""

    loop: list[loops.Turn] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    seconds: float = 0.0


def run(client: Client, words: tuple[str, ...], question: str, place: Place, log: Path) -> str:
    """Run a client to its end; what it printed. Raises Ds4Error if it fails or takes too long."""
    arguments = command(client, words, question)
    try:
        done = subprocess.run(
            arguments, cwd=place.work, env=place.environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=LIMIT, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise Ds4Error(f"{client.name} is not installed here; `make test-clients` does that") from None
    except subprocess.TimeoutExpired:
        raise Ds4Error(f"{client.name} did not end within {LIMIT:.0f} s") from None
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(arguments)}\n{done.stdout}\n{done.stderr}\n")
    if done.returncode:
        raise Ds4Error(f"{client.name} ended with status {done.returncode}: {(done.stderr or done.stdout)[-1500:]}")
    return done.stdout


def discover(client: Client, folder: Path) -> loops.Tool:
    """The tool with which a client reads files, from the prompt of a conversation without calls."""
    (folder / "hello.jsonl").write_text(script([answer("Hello there")]), encoding="utf-8")
    trace = folder / "tools.trace.jsonl"
    with server(["--ctx", str(CONTEXT), "--scripted", str(folder / "hello.jsonl"), "--trace", str(trace)]) as url:
        run(client, client.ask, QUESTION, install(client, folder / "tools", url), folder / "output.txt")
    asked = [turn for turn in _turns(trace) if loops.declared_tools(turn.text)]
    if not asked:
        raise Ds4Error(f"{client.name} declared no tools")
    return loops.reading_tool(asked[0].text)


def scripted(client: Client, folder: Path, result: Result) -> None:
    """The loop with a scripted model; what is wrong with it is put into the result."""
    tool = discover(client, folder)
    loop = folder / "loop"
    hidden = hide(loop / "work")
    files = [str(loop / "work" / name) for name in ("first.txt", "second.txt")]
    lines = [*(loops.call(tool, file) for file in files), answer(f"It is {hidden[1]}")]
    lines.append(answer(f"Again {hidden[1]}"))
    (folder / "loop.jsonl").write_text(script(lines), encoding="utf-8")
    trace = folder / "trace.jsonl"
    with server(["--ctx", str(CONTEXT), "--scripted", str(folder / "loop.jsonl"), "--trace", str(trace)]) as url:
        place = install(client, loop, url)
        if hidden[1] not in run(client, client.ask, QUESTION, place, folder / "output.txt"):
            result.wrong.append("its output does not have the model's answer")
        if client.go_on and hidden[1] not in run(client, client.go_on, AGAIN, place, folder / "output.txt"):
            result.wrong.append("its output does not have the answer to a second question")
        responses(url, result)
    found = [turn for turn in _turns(trace) if tool.name in turn.text]
    result.loop, further = found[:3], found[3:]
    result.wrong += loops.problems(result.loop, hidden)
    result.notes.append(f"reads with `{tool.name}`")
    if client.go_on:
        result.notes += _second_question(result.loop, further)


def _second_question(loop: list[loops.Turn], further: list[loops.Turn]) -> list[str]:
    """How much of the conversation a second question continues: told, as clients may change what was said before."""
    if not further or not loop:
        return ["the second question did not arrive"]
    turn = further[0]
    return [f"a second question reuses {turn.reused} of {loop[-1].state} tokens ({turn.source} {turn.detail})"]


def tiny(client: Client, folder: Path, result: Result) -> None:
    """The loop with the model that comes with ds4, with one file; what it could not do is put into the notes."""
    trace = folder / "trace.jsonl"
    hidden = str(secrets.randbelow(90) + 10)
    with server(["--strict-tools", "--tokens", "512", "--trace", str(trace)]) as url:
        place = install(client, folder / "loop", url)
        (place.work / "notes.txt").write_text(f"The code is {hidden}.\n", encoding="utf-8")
        printed = ""
        try:
            printed = run(client, client.ask, SIMPLE, place, folder / "output.txt")
        except Ds4Error as error:  # Codex ends so if an answer was cut by its limit
            result.notes.append(str(error).strip().splitlines()[0][:80])
        responses(url, result)
    result.loop = [turn for turn in _turns(trace) if loops.declared_tools(turn.text)]
    read = any(hidden in turn.text for turn in result.loop[1:])
    called = bool(result.loop) and result.loop[0].reason == "tool_calls"
    said = hidden in printed
    result.notes.append(
        f"prompt of {result.loop[0].tokens if result.loop else 0} tokens; "
        f"{'a call' if called else 'no call'}, {'the file' if read else 'no file'} read, "
        f"{'the right answer' if said else 'no right answer'}"
    )
    for before, turn in zip(result.loop, result.loop[1:], strict=False):
        # Told only: clients ask anew after empty answers, and rewrite calls that make no sense to them.
        result.notes += loops.continues(before, turn)


def responses(url: str, result: Result) -> None:
    """Which paths a client used; a status other than 200 is wrong."""
    counts = read(url, "/stats")["http_responses"]
    counts.pop("/health", None)
    counts.pop("/stats", None)
    result.notes.append("used " + ", ".join(f"{path} ({sum(found.values())})" for path, found in counts.items()))
    for path, found in counts.items():
        result.wrong += [f"{path} answered {status}" for status in found if status != "200"]


def hide(folder: Path) -> list[str]:
    """Two files, of which the first one names the second; a secret in each."""
    folder.mkdir(parents=True)
    hidden = [secrets.token_hex(6) for _ in range(2)]
    (folder / "first.txt").write_text(f"Read second.txt ({hidden[0]}).\n", encoding="utf-8")
    (folder / "second.txt").write_text(f"The launch code is {hidden[1]}.\n", encoding="utf-8")
    return hidden


def check(client: Client, folder: Path, with_tiny: bool, alone: bool) -> Result:
    """Run one client; never raises what is the client's or the server's mistake."""
    folder.mkdir(parents=True)
    result = Result()
    began = time.monotonic()
    with network.recorded_names() if alone else nullcontext(set[str]()) as asked:
        try:
            (tiny if with_tiny else scripted)(client, folder, result)
        except Ds4Error as error:
            result.wrong.append(str(error))
        result.asked = set(asked)
    if result.asked:
        result.wrong.append(f"it asked for other hosts: {', '.join(sorted(result.asked))}")
    result.seconds = time.monotonic() - began
    return result


def report(client: Client, result: Result) -> None:
    """Print what came of a client."""
    print(f"{client.name} {version(client)}: {'WRONG' if result.wrong else 'good'} ({result.seconds:.0f} s)")
    for before, turn in zip([None, *result.loop], result.loop, strict=False):
        part = f", {100 * min(1, turn.reused / before.state):.2f} % of the state before" if before else ""
        print(
            f"  request {turn.number}: {turn.tokens} tokens, {turn.reused} reused"
            f" ({turn.source}{' ' + turn.detail if turn.detail else ''}){part}; {turn.reason}"
        )
    for text in (*result.notes, *(f"WRONG: {text}" for text in result.wrong)):
        print(f"  {text}")
    sys.stdout.flush()


def version(client: Client) -> str:
    """The installed version of a client of npm; empty for a script."""
    if client.package is None:
        return ""
    file = NPM / "node_modules" / client.package / "package.json"
    return str(json.loads(file.read_text(encoding="utf-8"))["version"]) if file.is_file() else "(not installed)"


def _turns(trace: Path) -> list[loops.Turn]:
    return loops.turns(trace.read_text(encoding="utf-8").splitlines())


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"some of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--tiny", action="store_true", help="the embedded model answers, and its skill is told")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave traces and output in this new folder")
    parser.add_argument("--variants", action="store_true", help=f"these instead: {', '.join(VARIANTS)}")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.clients if name not in {**CLIENTS, **VARIANTS}]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not among {', '.join({**CLIENTS, **VARIANTS})}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the clients; 1 if one had a problem."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    alone = network.inside(given)
    options = parse(given)
    if not alone:
        network.enter(given)
        print("no network of its own here: other hosts are not noticed")
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep.absolute() if options.keep else Path(temporary)
        if alone:
            network.set_up(Path(temporary))
            print("in a network that ends at this machine")
        for name in options.clients or (VARIANTS if options.variants else CLIENTS):
            client = {**CLIENTS, **VARIANTS}[name]
            result = check(client, folder / name, options.tiny, alone)
            report(client, result)
            failed |= bool(result.wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
