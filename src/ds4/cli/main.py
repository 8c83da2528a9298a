"""The console command `ds4`: answers once, talks, or looks into a model.

Modules that load torch or a terminal library are imported where they are needed: `ds4 --help`, `--inspect FILE` and
every mistake in the flags answer at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from ds4.cli.options import Options, parse
from ds4.errors import Ds4Error
from ds4.process import exit_at_interrupt, wait_passively

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
    return run("ds4", lambda: _prepare(parse(sys.argv[1:] if argv is None else argv)))


def run(program: str, prepare: Callable[[], Callable[[], int]]) -> int:
    """Run a command; the exit status as of `main`.

    Args:
        program: its name, which messages begin with.
        prepare: reads the flags and loads what they ask for; what it returns does the work and gives the status.
    """
    wait_passively()
    fill_standard_streams()
    try:
        status = _guarded(program, prepare)
        # What cannot be written has to be told here; at its own end the interpreter only shows a traceback.
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has gone.
        discard(sys.stdout)
    except OSError as error:
        discard(sys.stdout)
        place = f"{error.filename}: " if error.filename else "the output cannot be written: "
        complain(f"{place}{error.strerror or error}", program)
    return FAILED


def _guarded(program: str, prepare: Callable[[], Callable[[], int]]) -> int:
    try:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")

        with exit_at_interrupt():
            job = prepare()
        return job()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED if end.code else OK
    except Ds4Error as error:
        complain(str(error), program)
        return FAILED
    except KeyboardInterrupt:
        complain("interrupted", program)
        return INTERRUPTED


def _prepare(options: Options) -> Callable[[], int]:
    """Load what the flags ask for; what is returned does it."""
    if options.inspect is not None:
        from ds4.cli.inspect import inspect

        path = options.inspect or model_path(options)
        return lambda: inspect(path)
    if options.plan:
        return _plan(options)
    if options.imatrix_out is not None or options.perplexity_file is not None:
        from ds4.cli import quality

        return quality.collect(options) if options.imatrix_out is not None else quality.perplexity(options)
    prompt = read_prompt(options, sys.stdin)
    looks = options.dump_logits or options.dump_logprobs or options.decode_consistency
    if options.dump_tokens or looks:
        if prompt is None:
            complain("this needs a prompt; give --prompt or --prompt-file")
            return lambda: WRONG_FLAGS
        return _dump_tokens(options, prompt) if options.dump_tokens else _diagnose(options, prompt)
    if prompt is None:
        from ds4.cli.repl import run_repl

        talk = conversation(load_engine(options), options)
        return lambda: run_repl(talk, options)
    text, talk = prompt, conversation(load_engine(options), options)
    return lambda: answer_once(talk, options, text, sys.stdout, sys.stderr)


def _plan(options: Options) -> Callable[[], int]:
    from ds4.engine.device import plan_table

    sessions, chunk = options.sessions or 1, options.prefill_chunk
    table = plan_table(
        model_path(options),
        context=options.context,
        sessions=sessions,
        chunk=chunk,
        cards=options.cards,
        quality=options.quality,
        expert_layout=options.expert_layout,
    )

    def job() -> int:
        sys.stdout.write(table)
        return OK

    return job


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
    if answer.end == "length":
        err.write(f"[cut off at {options.max_tokens} tokens; --tokens sets this limit]\n")
    elif answer.end == "context":
        err.write(f"[cut off: the context of {talk.engine.context} tokens is full; --ctx sets its size]\n")
    if err.isatty():
        err.write(f"[{answer.speed()}]\n")
    return INTERRUPTED if answer.end == "interrupted" else OK


def _dump_tokens(options: Options, prompt: str) -> Callable[[], int]:
    from ds4.cli.diagnostics import write_tokens
    from ds4.gguf.file import open_model
    from ds4.tokenizer import Tokenizer

    file = open_model(model_path(options))
    if not file.has_tokenizer:
        raise Ds4Error(f"the model {file.path} has no tokenizer, so it has no tokens of a text; use a complete file")
    tokenizer = Tokenizer.from_metadata(file.metadata, file.path)
    context = min(options.context or file.shape.context, file.shape.context)
    ids = prompt_ids(tokenizer, prompt, options, context)

    def job() -> int:
        write_tokens(tokenizer, ids, sys.stdout)
        return OK

    return job


def _diagnose(options: Options, prompt: str) -> Callable[[], int]:
    from ds4.files import destination

    for path in (options.dump_logits, options.dump_logprobs):
        if path not in (None, "-"):
            destination(path)  # refused now, not after the prompt was read
    from ds4.cli import diagnostics
    from ds4.cli.terminal import Bar

    engine = load_engine(options)
    ids = prompt_ids(engine.tokenizer, prompt, options, engine.context)

    def job() -> int:
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

    return job


def read_prompt(options: Options, stdin: TextIO) -> str | None:
    """The prompt of the flags, or of a standard input that is no terminal; None to ask for it.

    One line break at the end of a file or of standard input does not belong to the prompt, unless it is raw.

    Raises:
        Ds4Error: the text cannot be read, or there is none.
    """
    if options.prompt is not None:
        return options.prompt
    if options.prompt_file is not None and options.prompt_file != "-":
        from ds4.cli.prompt import read_text

        text = read_text(options.prompt_file)
    elif options.prompt_file == "-" or not stdin.isatty():
        try:
            text = stdin.read()
        except OSError as error:
            raise Ds4Error(f"standard input cannot be read: {error.strerror or error}") from error
    else:
        return None
    text = text if options.raw_prompt else text.removesuffix("\n")
    if not text:
        source = "standard input" if options.prompt_file in (None, "-") else options.prompt_file
        raise Ds4Error(f"there is no prompt, {source} is empty; give --prompt TEXT, or run ds4 on a terminal")
    return text


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


def load_engine(options: Options, context: int | None = None, history: bool = True) -> Engine:
    """The model of the flags, with a bar on stderr while it loads.

    Args:
        context: taken where the flags do not say; less if the model has less.
        history: keep ways back into a conversation. What only goes forward does not need them.
    """
    from ds4.cli.terminal import Bar
    from ds4.engine import EngineConfig
    from ds4.engine.loading import load

    config = EngineConfig(
        context=options.context or context,
        checkpoint_interval=EngineConfig.checkpoint_interval if history else 0,
        prefill_chunk=options.prefill_chunk,
        threads=options.threads,
        quality=options.quality,
        expert_layout=options.expert_layout,
        sessions=options.sessions or (2 if options.decode_consistency else 1),
    )
    with Bar("loading the model", sys.stderr, transfer=True) as bar:
        engine = load(options.model, options.device, config=config, progress=bar)
    if options.warmup:
        with Bar("compiling kernels, kept for the next start", sys.stderr) as bar:
            engine.warm_up(bar)
    if options.context is not None and engine.context < options.context:
        complain(
            f"the model allows a context of {engine.context} tokens, so --ctx {options.context} is lowered to that"
        )
    return engine


def complain(text: str, program: str = "ds4") -> None:
    """A message on standard error, if that can be written."""
    try:
        print(f"{program}: {text}", file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Let what a stream holds and gets go nowhere; it could not be written even when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError):  # a stream that is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def fill_standard_streams() -> None:
    """Give streams that were closed before we began a file that is empty and takes everything."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # This takes the lowest free number, so no file that is opened later gets that of a standard stream.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
