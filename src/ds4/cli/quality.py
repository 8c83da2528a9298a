"""`ds4 --imatrix-out` and `ds4 --perplexity-file`: what the activations look like, and how well a text is predicted."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

from ds4.cli.main import INTERRUPTED, OK, complain, load_engine, model_path
from ds4.cli.options import Options
from ds4.cli.terminal import Bar, interrupts
from ds4.errors import Ds4Error
from ds4.files import destination, refuse_input

IMATRIX_CONTEXT = 32_768
"""Tokens of a prompt that are evaluated, if --ctx says nothing else."""


def collect(options: Options) -> Callable[[], int]:
    """Read the prompts and load the model; what is returned evaluates them and writes the importance matrix."""
    from ds4.quantize import calibration
    from ds4.quantize import collect as collecting

    assert options.imatrix_out is not None
    assert options.imatrix_dataset is not None
    out, dataset = options.imatrix_out, options.imatrix_dataset
    destination(out)  # before hours of work
    refuse_input(out, [dataset, model_path(options)])
    prompts = calibration.read_prompts(dataset, options.template)
    engine = load_engine(options, context=IMATRIX_CONTEXT, history=False)
    limits = collecting.Limits(options.imatrix_max_prompts, options.imatrix_max_tokens)

    def told(collector: collecting.Collector) -> None:
        complain(f"{collector.prompts} prompts, {collector.tokens} tokens so far, kept in {out}.progress")

    def job() -> int:
        with interrupts() as stopped, Bar("collecting importance, prompts", sys.stderr) as bar:
            end = collecting.collect(
                engine,
                prompts,
                out,
                dataset=Path(dataset).name,
                model=fingerprint(model_path(options)),
                limits=limits,
                progress=bar,
                saved=told,
                stopped=stopped,
            )
        if end.resumed:
            complain(f"went on behind the {end.resumed} prompts of an earlier run")
        if end.cut:
            complain(f"{end.cut} prompts were cut off at {engine.context} tokens; --ctx sets the limit")
        if not end.done:
            complain(f"stopped after {end.prompts} prompts; the same command goes on from {out}.progress")
            return INTERRUPTED
        print(f"{out}: {end.prompts} prompts, {end.tokens} tokens, {end.unseen} experts without a token")
        return OK

    return job


def perplexity(options: Options) -> Callable[[], int]:
    """Read the text and load the model; what is returned scores it and prints the result."""
    from ds4.evals import perplexity as measure
    from ds4.files import read_text

    assert options.perplexity_file is not None
    path = options.perplexity_file
    text = read_text(path)
    engine = load_engine(options, context=measure.DEFAULT_WINDOW, history=False)
    ids = engine.tokenizer.encode_chat(text) if options.raw_prompt else engine.tokenizer.encode(text)
    bos = engine.tokenizer.bos
    if ids[:1] == [bos]:  # every window begins with one
        ids = ids[1:]
    if not ids:
        raise Ds4Error(f"{path}: there is no text to score in this file")
    window = min(options.context or measure.DEFAULT_WINDOW, engine.context)

    def job() -> int:
        with Bar("scoring the text, tokens", sys.stderr) as bar:
            found = measure.perplexity(engine, ids, window, bar)
        print(
            f"{found.tokens} tokens in {found.windows} windows of {window}: NLL {found.nll:.5f} +- {found.error:.5f}"
            f" nats a token, perplexity {found.value:.4f}"
        )
        return OK

    return job


def fingerprint(path: str) -> str:
    """What tells one model file from another: its size, and a hash of its first and last MiB."""
    piece = 1 << 20
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            digest = hashlib.sha256(file.read(piece))
            file.seek(max(0, size - piece))
            digest.update(file.read(piece))
    except OSError as error:
        raise Ds4Error(f"{path}: cannot be read: {error.strerror}") from error
    return f"{size}-{digest.hexdigest()[:16]}"
