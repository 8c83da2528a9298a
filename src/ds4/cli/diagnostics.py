"""Looking into the model: tokens of a prompt, logits, most probable tokens, and whether decoding equals prefilling."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from ds4.errors import ContextOverflowError, Ds4Error
from ds4.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from ds4.engine import Engine, Session

Progress = Callable[[int, int], None]

STDOUT = "-"


def write_tokens(tokenizer: Tokenizer, ids: Sequence[int], out: TextIO) -> None:
    """One line for each token: position, id, and its text as a JSON string (bytes that are no text as \\ufffd)."""
    for position, id in enumerate(ids):
        text = json.dumps(tokenizer.token_bytes(id).decode("utf-8", "replace"), ensure_ascii=False)
        out.write(f"{position:6} {id:7}  {text}\n")


def write_logits(engine: Engine, ids: Sequence[int], path: str, progress: Progress | None = None) -> None:
    """Write the logits after the prompt, float32 [vocab].

    A name that ends in .npz gives an archive of `tokens` (int32 [n], the prompt) and `logits`, one that ends in .npy an
    array, any other the plain little-endian values.
    """
    session = engine.session()
    session.sync(list(ids), progress=progress)
    logits = session.logits.numpy().astype("<f4")
    try:
        with Path(path).open("wb") as file:
            if path.endswith(".npz"):
                np.savez(file, tokens=np.asarray(ids, dtype=np.int32), logits=logits)
            elif path.endswith(".npy"):
                np.save(file, logits)
            else:
                file.write(logits.tobytes())
    except OSError as error:
        raise _cannot_write(path, error) from error


def write_logprobs(
    engine: Engine, ids: Sequence[int], path: str, steps: int, top_k: int, progress: Progress | None = None
) -> None:
    """Write a greedy continuation as JSON; "-" is standard output.

    The object has `source`, `prompt_tokens` (their number), `ctx`, `top_k` and `steps`, a list of {step, selected,
    top_logprobs}: `selected` is the token {id, text, bytes}, `top_logprobs` the most probable ones, best first, as
    {token, logit, logprob}. The continuation ends after the end-of-sentence token.
    """
    tokenizer = engine.tokenizer
    session = engine.session()
    session.sync(list(ids), progress=progress)
    records = []
    for step in range(min(steps, engine.context - len(ids))):
        logits = session.logits
        token = _best(logits)
        records.append(
            {"step": step, "selected": _token(tokenizer, token), "top_logprobs": _top(tokenizer, logits, top_k)}
        )
        if token == tokenizer.eos:
            break
        session.step(token)
    result = {
        "source": "ds4",
        "prompt_tokens": len(ids),
        "ctx": engine.context,
        "top_k": min(top_k, engine.shape.vocab),
        "steps": records,
    }
    write_json(result, path)


def write_json(value: Any, path: str) -> None:
    """Write a JSON document to a file, or to standard output for "-"."""
    text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _cannot_write(path, error) from error


def decode_consistency(
    engine: Engine, ids: Sequence[int], steps: int, progress: Progress | None = None
) -> tuple[int, float]:
    """Decode greedily token by token, evaluate the same tokens again in one prefill, and compare all logits.

    Returns:
        (positions compared, largest absolute difference); on the CPU the difference is 0.

    Raises:
        ContextOverflowError: prompt and steps do not fit the context.
    """
    prompt = list(ids)
    if len(prompt) + steps > engine.context:
        raise ContextOverflowError(len(prompt) + steps, engine.context)
    session = engine.session()
    session.sync(prompt, progress=progress)
    decoded = [session.logits]
    for _ in range(steps):
        decoded.append(session.step(_best(decoded[-1])))
    again = _logits_of_prefill(engine.session(), session.tokens, len(prompt) - 1)
    worst = max(float((a - b).abs().max()) for a, b in zip(decoded, again, strict=True))
    return len(decoded), worst


def _logits_of_prefill(session: Session, ids: Sequence[int], first: int) -> list[Tensor]:
    """The logits behind positions first .. of a prefill in the engine's chunks."""
    rows: list[Tensor] = []
    chunk = session.engine.prefill_chunk
    for start in range(0, len(ids), chunk):
        part = list(ids[start : start + chunk])
        (logits,) = session.engine.step([(session, part)], logits="all" if start + len(part) > first else "none")
        if logits is not None:
            rows += logits[max(0, first - start) :]
    return rows


def _best(logits: Tensor) -> int:
    return int(np.argmax(logits.numpy()))


def _top(tokenizer: Tokenizer, logits: Tensor, count: int) -> list[dict[str, Any]]:
    values = logits.double().numpy()
    total = values.max() + np.log(np.exp(values - values.max()).sum())
    order = np.argsort(-values, kind="stable")[:count]
    return [
        {"token": _token(tokenizer, int(i)), "logit": float(values[i]), "logprob": float(values[i] - total)}
        for i in order
    ]


def _token(tokenizer: Tokenizer, id: int) -> dict[str, Any]:
    data = tokenizer.token_bytes(id)
    return {"id": id, "text": data.decode("utf-8", "replace"), "bytes": list(data)}


def _cannot_write(path: str, error: OSError) -> Ds4Error:
    return Ds4Error(f"{path}: cannot be written: {error.strerror}")
