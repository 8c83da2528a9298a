"""One run of the benchmark, from the model file to the results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import Progress

from ds4.bench.settings import SMALL, SMALL_HIDDEN, Outputs, Settings
from ds4.errors import Ds4Error

if TYPE_CHECKING:
    from torch import Tensor

    from ds4.bench.meter import Meter
    from ds4.bench.results import Results
    from ds4.bench.traffic import Traffic
    from ds4.engine import Engine
    from ds4.gguf.file import ModelFile
    from ds4.gguf.shape import Shape


Layout = Literal["auto", "a", "b"]
"""As `ds4.engine.EngineConfig.expert_layout`."""

TABLE_WIDTH = 170
"""Columns that a table may take."""


@dataclass(frozen=True)
class Job:
    """The command line as values; see there.

    Attributes:
        wanted: the fields of `Settings` that were given.
        growth: tokens and requests of the check of memory; None: the walk.
    """

    model: Path | None = None
    device: str = "auto"
    threads: int | None = None
    chunk: int | None = None
    quality: bool | None = None
    layout: Layout = "b"
    alloc: int | None = None
    wanted: dict[str, Any] = field(default_factory=dict)
    prompt: Path | None = None
    chat: Path | None = None
    system: str = ""
    note: str = ""
    growth: tuple[int, int] | None = None
    outputs: Outputs = field(default_factory=Outputs)


def wide_console() -> Console:
    """Standard output, so wide that tables are whole; a narrower terminal wraps their lines."""
    console = Console(soft_wrap=True)
    console.width = max(console.width, TABLE_WIDTH)
    return console


def settings_for(shape: Shape, wanted: dict[str, Any]) -> Settings:
    """What was wanted, and what suits the model for the rest: small ones take short contexts.

    Raises:
        Ds4Error: the values cannot be used together.
    """
    known: dict[str, Any] = dict(SMALL) if shape.hidden <= SMALL_HIDDEN else {}
    if "increment" in wanted and "multiply" not in wanted:
        known["multiply"] = 1
    standard = Settings(**known)
    if wanted.get("fill"):
        known["first_token"] = 0
    else:
        known["end"] = end = max(wanted.get("end", standard.end), 1 if "end" in wanted else wanted.get("start", 1))
        known["start"] = min(standard.start, end)
        known["first_token"] = min(standard.first_token, end)
    return Settings(**{**known, **wanted})


def run(job: Job, console: Console | None = None) -> Results:
    """Measure, print and write what the job says.

    Raises:
        Ds4Error: something of it cannot be used, or a file cannot be written.
    """
    console = console or wide_console()
    job.outputs.check()
    from ds4.gguf.file import embedded_model_path, open_model

    file = open_model(embedded_model_path() if job.model is None else job.model)
    settings = settings_for(file.shape, job.wanted)
    if settings.longest > file.shape.context:
        raise Ds4Error(
            f"{settings.longest} tokens of context are needed, {settings.decode} decoded ones among them, but the model"
            f" has {file.shape.context}; lower --ctx-max, --fill-context or --gen-tokens"
        )
    if job.alloc is not None and job.alloc < settings.longest:
        raise Ds4Error(f"--ctx-alloc {job.alloc} is too small: {settings.longest} tokens are needed")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        engine, meter, results = _load(job, file, settings, progress)
        console.print(results.heading(), highlight=False, markup=False)
        ids = _ids(engine, job, settings)
        if job.growth is not None:
            _growth(engine, ids, job, meter, results, progress, settings)
        else:
            _walk(engine, ids, job, meter, results, progress, settings, file)
    if job.growth is None:
        console.print(results.table())
    for line in results.growth_lines():
        console.print(line, highlight=False)
    return results


def _load(job: Job, file: ModelFile, settings: Settings, progress: Progress) -> tuple[Engine, Meter, Results]:
    from ds4.bench.meter import Meter
    from ds4.bench.results import Results
    from ds4.engine import EngineConfig
    from ds4.engine.device import choose
    from ds4.engine.loading import load

    device = choose(job.device, file, file.qat_sim)
    config = EngineConfig(
        context=job.alloc or settings.longest,
        prefill_chunk=job.chunk,
        checkpoint_interval=0,  # a checkpoint is a copy to the host, which belongs to no token
        threads=job.threads,
        sessions=settings.live_sessions,
        quality=job.quality,
        expert_layout=job.layout,
    )
    begin = time.perf_counter()
    engine = load(file.path, str(device), config=config, progress=_bar(progress, "loading the model"))
    meter = Meter(device)
    loaded = meter.now()
    engine.warm_up(_bar(progress, "compiling kernels"))
    warm = meter.now()
    model = {
        "file": file.path.name,
        "bytes": file.path.stat().st_size,
        "name": str(file.metadata.get("general.name", "")),
        "profile": file.shape.name,
        "identity": file.identity(),
    }
    chosen = asdict(settings) | {"context": engine.context, "prefill_chunk": engine.prefill_chunk}
    chosen |= {"quality": engine.quality, "expert_layout": engine.expert_layout}
    chosen |= {"prompt": str(job.prompt or job.chat or "random tokens")}
    bandwidth = meter.copy_bandwidth()
    parts = _traffic(engine, file).parts()
    results = Results(meter.machine(), model, chosen, parts, bandwidth, loaded - begin, warm - loaded, job.note)
    return engine, meter, results


def _traffic(engine: Engine, file: ModelFile) -> Traffic:
    from ds4.bench.traffic import Traffic

    return Traffic.of(engine, file.tensors)


def _ids(engine: Engine, job: Job, settings: Settings) -> list[int]:
    from ds4.bench.prompts import chat_ids, random_ids, text_ids

    count = max(settings.contexts()[-1][1], settings.first_token)
    if job.prompt is not None:
        return text_ids(engine, job.prompt, count)
    if job.chat is not None:
        return chat_ids(engine, job.chat, job.system, count)
    return random_ids(engine, count, settings.seed)


def _walk(
    engine: Engine, ids: list[int], job: Job, meter: Meter, results: Results, progress: Progress, settings: Settings,
    file: ModelFile,
) -> None:  # fmt: skip
    """Fill the results; the files are written after every row, so that a run that is broken off leaves what it has."""
    from ds4.bench.walk import Walk

    out = job.outputs
    walk = Walk(
        engine, settings, ids, _traffic(engine, file), meter, results.copy_bandwidth, profiling=out.profile is not None
    )
    walk.warm_up()
    contexts = settings.contexts()
    bar = _bar(progress, "measuring")
    seen = _writer(out.logits) if out.logits is not None else None
    for number, row in enumerate(walk.rows(seen), 1):
        results.rows.append(row)
        bar(number, len(contexts))
        _write(out, results, walk)
    results.first_token = walk.first_token()
    _write(out, results, walk)
    if out.plot is not None:
        from ds4.bench.plot import write_plot

        write_plot(results, out.plot)


def _write(out: Outputs, results: Results, walk: Any) -> None:
    from ds4.bench.results import profile_json, write_text

    if out.json is not None:
        write_text(out.json, results.to_json())
    if out.csv is not None:
        write_text(out.csv, results.to_csv())
    if out.profile is not None:
        write_text(out.profile, profile_json(walk.profiles, results))


def _writer(folder: Path) -> Callable[[int, Tensor], None]:
    import io

    import numpy as np

    from ds4.bench.results import write_bytes

    def write(context: int, logits: Tensor) -> None:
        data = io.BytesIO()
        np.save(data, logits.numpy().astype("<f4"))
        write_bytes(folder / f"logits-{context}.npy", data.getvalue())

    return write


def _growth(
    engine: Engine, ids: list[int], job: Job, meter: Meter, results: Results, progress: Progress, settings: Settings
) -> None:
    from ds4.bench.growth import measure_growth
    from ds4.bench.results import write_text

    assert job.growth is not None
    tokens, requests = job.growth
    length = settings.longest - 2
    for growth in measure_growth(engine, ids, tokens, requests, length, meter, _bar(progress, "measuring memory")):
        results.growth.append(growth)
    if job.outputs.json is not None:
        write_text(job.outputs.json, results.to_json())


def _bar(progress: Progress, title: str) -> Callable[[int, int], None]:
    """A bar that appears with the first call of (done, total), and goes with the last."""
    task = progress.add_task(title, total=None, visible=False)

    def update(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total, visible=done < total)

    return update
