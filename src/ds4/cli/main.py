"""The console command `ds4`: answers once, talks, or looks into a model.

Modules that load torch or a terminal library are imported where they are needed: `ds4 --help`, `--inspect FILE` and
every mistake in the flags answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from ds4.cli.options import Options, parse
from ds4.errors import Ds4Error
from ds4.openmp import wait_passively

if TYPE_CHECKING:
    from ds4.cli.conversation import Conversation
    from ds4.cli.prompt import Style
    from ds4.engine import Engine
    from ds4.tokenizer import Tokenizer

OK, FAILED, WRONG_FLAGS, INTERRUPTED = 0, 1, 2, 130

LOGPROB_STEPS = 32
"""Steps of --dump-logprobs where --tokens does not say otherwise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 for an error, 2 for wrong flags, 130 after Ctrl+C."""
    wait_passively()
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        return _run(options)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    except Ds4Error as error:
        print(f"ds4: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("ds4: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; without this the interpreter would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(options: Options) -> int:
    if options.inspect is not None:
        from ds4.cli.inspect import inspect

        return inspect(options.inspect or model_path(options))
    if options.bench:
        from ds4.cli.bench import run_bench

        return run_bench(load_engine(options), options, sys.stdout)
    prompt = read_prompt(options, sys.stdin)
    looks = options.dump_logits or options.dump_logprobs or options.decode_consistency
    if options.dump_tokens or looks:
        if prompt is None:
            print("ds4: this needs a prompt; give --prompt or --prompt-file", file=sys.stderr)
            return WRONG_FLAGS
        return _dump_tokens(options, prompt) if options.dump_tokens else _diagnose(options, prompt)
    if prompt is None:
        from ds4.cli.repl import run_repl

        return run_repl(conversation(load_engine(options), options), options)
    return answer_once(conversation(load_engine(options), options), options, prompt, sys.stdout, sys.stderr)


def answer_once(talk: Conversation, options: Options, prompt: str, out: TextIO, err: TextIO) -> int:
    """Print the answer to one prompt; the exit status.

    On a terminal the thinking stands dimmed before the answer. If `out` is no terminal it gets the answer alone, and
    the thinking goes to `err`.
    """
    from ds4.cli.terminal import AnswerPrinter, Bar, interrupts

    printer = AnswerPrinter(out, None if options.hide_thinking else out if out.isatty() else err)
    ask = talk.continue_text if options.raw_prompt else talk.ask
    try:
        with interrupts() as stopped, Bar("reading the prompt", err) as bar:
            answer = ask(prompt, printer, stopped=stopped, progress=bar)
    finally:
        printer.end()
    if err.isatty():
        err.write(f"[{answer.speed()}]\n")
    return INTERRUPTED if answer.end == "interrupted" else OK


def _dump_tokens(options: Options, prompt: str) -> int:
    from ds4.cli.diagnostics import write_tokens
    from ds4.gguf.file import open_model
    from ds4.tokenizer import Tokenizer

    file = open_model(model_path(options))
    tokenizer = Tokenizer.from_metadata(file.metadata)
    context = min(options.context or file.shape.context, file.shape.context)
    write_tokens(tokenizer, prompt_ids(tokenizer, prompt, options, context), sys.stdout)
    return OK


def _diagnose(options: Options, prompt: str) -> int:
    from ds4.cli import diagnostics
    from ds4.cli.terminal import Bar

    engine = load_engine(options)
    ids = prompt_ids(engine.tokenizer, prompt, options, engine.context)
    with Bar("reading the prompt", sys.stderr) as bar:
        if options.dump_logits:
            diagnostics.write_logits(engine, ids, options.dump_logits, bar)
        elif options.dump_logprobs:
            steps = LOGPROB_STEPS if options.max_tokens is None else options.max_tokens
            diagnostics.write_logprobs(engine, ids, options.dump_logprobs, steps, options.logprobs_top_k, bar)
        elif options.decode_consistency:
            positions, worst = diagnostics.decode_consistency(engine, ids, options.decode_consistency, bar)
            print(f"{positions} positions, largest difference between decode and prefill: {worst:g}")
            return OK if worst == 0 else FAILED
    return OK


def read_prompt(options: Options, stdin: TextIO) -> str | None:
    """The prompt of the flags, or of a standard input that is no terminal; None to ask for it.

    One line break at the end of a file or of standard input does not belong to the prompt, unless it is raw.
    """
    if options.prompt is not None:
        return options.prompt
    if options.prompt_file is not None and options.prompt_file != "-":
        from ds4.cli.prompt import read_text

        text = read_text(options.prompt_file)
    elif options.prompt_file == "-" or not stdin.isatty():
        text = stdin.read()
    else:
        return None
    return text if options.raw_prompt else text.removesuffix("\n")


def prompt_ids(tokenizer: Tokenizer, prompt: str, options: Options, context: int) -> list[int]:
    """The model's whole input: a raw prompt as it is, any other in the chat template."""
    if options.raw_prompt:
        return tokenizer.encode_chat(prompt)
    from ds4.chat import Message
    from ds4.cli.prompt import render_question

    return tokenizer.encode_chat(render_question([Message(role="user", content=prompt)], style(options), context))


def style(options: Options) -> Style:
    """How the flags want questions to be put."""
    from ds4.cli.prompt import Style

    return Style(options.system, options.template, options.mode)


def conversation(engine: Engine, options: Options) -> Conversation:
    """An empty conversation as the flags want it."""
    from ds4.cli.conversation import Conversation
    from ds4.engine import Sampling

    sampling = Sampling(options.temperature, options.top_p, options.min_p, options.top_k, options.seed)
    return Conversation(engine, style(options), sampling, options.max_tokens)


def model_path(options: Options) -> str:
    """The model file of the flags."""
    if options.model is not None:
        return options.model
    from ds4.gguf import file

    return str(file.embedded_model_path())


def load_engine(options: Options) -> Engine:
    """The model of the flags, with a bar on stderr while it loads."""
    from ds4.cli.terminal import Bar
    from ds4.engine import EngineConfig
    from ds4.engine.loading import load

    chunk = options.prefill_chunk or EngineConfig().prefill_chunk
    config = EngineConfig(context=options.context, prefill_chunk=chunk, threads=options.threads)
    with Bar("loading the model", sys.stderr, transfer=True) as bar:
        return load(options.model, config=config, progress=bar)


if __name__ == "__main__":
    sys.exit(main())
