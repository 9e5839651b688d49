"""What the command line prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from finray.errors import DataError
from finray.records import Note, PrepareProgress, Record, RunHeader
from finray.tracking.console import ConsoleTracker, PrepareView, duration

if TYPE_CHECKING:
    # At run time these would import torch, which `finray config show` has no use for.
    from finray.evaluation.compare import Comparison, Progress
    from finray.evaluation.prompts import Prompt
    from finray.runtime.driver import TrainResult

# Arguments of several commands.
ConfigFile = Annotated[Path, typer.Argument(help="YAML config file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides: section.field=value.", show_default=False)]


def console() -> Console:
    """Standard output; wide where it is not a terminal, so that lines stay whole in a log."""
    return Console(width=None if sys.stdout.isatty() else 160, emoji=False)


class RunView:
    """Shows the records of a run as they come: notes, the header, progress, warnings."""

    def __init__(self, target: Console) -> None:
        self._console = target
        self._progress: ConsoleTracker | None = None
        self._preparing: PrepareView | None = None

    def __enter__(self) -> RunView:
        return self

    def __exit__(self, *error: object) -> None:
        for view in (self._progress, self._preparing):
            if view is not None:
                view.close()

    def handle(self, record: Record) -> None:
        """Show one record."""
        if isinstance(record, RunHeader):
            if self._progress is not None:
                self._progress.close()
                self._console.print("the workers were restarted", style="bold yellow", highlight=False)
            for line in header_lines(record):
                self._console.print(line, highlight=False, soft_wrap=True)
            self._progress = ConsoleTracker(self._console, total_steps=record.total_steps, step=record.step)
        elif isinstance(record, PrepareProgress):
            self._preparing = self._preparing or PrepareView(self._console, total=record.total)
            self._preparing.show(record)
        elif isinstance(record, Note):
            is_warning = record.level == "warning"
            text = f"warning: {record.message}" if is_warning else record.message
            self._console.print(text, style="bold yellow" if is_warning else None, highlight=False, soft_wrap=True)
        elif self._progress is not None:
            self._progress.log(record)


def header_lines(header: RunHeader) -> list[str]:
    """The run header: model, trainable share, data, placement, effective batch, and where the run stands."""
    lines = [
        f"model      {header.model}  {header.parameters / 1e6:,.1f} M parameters, "
        f"{header.trainable / 1e6:,.2f} M trained ({header.trainable / header.parameters:.2%}), {header.precision}",
        f"data       {header.rows:,} rows, {header.tokens:,} tokens ({header.supervised / header.tokens:.0%} learned)"
        + (f" in {header.packs:,} packs ({header.fill:.1%} full)" if header.packing else "")
        + (f"; {header.eval_rows:,} rows held out" if header.eval_rows else ""),
        f"placement  {header.world_size} x {header.device}"
        + (f", {header.threads} thread{'s' if header.threads > 1 else ''} each" if header.device == "CPU" else ""),
        f"batch      {header.global_batch_size} {'packs' if header.packing else 'rows'} = {header.world_size} workers "
        f"x {header.micro_batch_size} micro-batch x {header.accumulation} accumulation",
    ]
    if header.step:
        lines.append(f"resuming   at step {header.step} of {header.total_steps}")
    return lines


def training_summary(target: Console, result: TrainResult) -> None:
    """What came out, how long each phase took, and what to do next."""
    numbers = result.summary
    phases = numbers.phases
    table = Table(title="run finished", show_header=False, title_justify="left")
    table.add_row("steps", f"{numbers.step:,}")
    if numbers.final_loss is not None:
        table.add_row("loss", f"{numbers.first_loss:.4f} at the first step, {numbers.final_loss:.4f} at the last")
    if numbers.best is not None:
        table.add_row(f"best {numbers.best_metric.replace('_', ' ')}", f"{numbers.best:.4f}")
    table.add_row("tokens", f"{numbers.tokens:,} ({numbers.tokens_per_s:,.0f} tokens/s)")
    table.add_row(
        "peak memory", ", ".join(f"{peak / 2**30:.2f} GiB" for peak in numbers.peak_memory_bytes) + " by worker"
    )
    shown = ("start_ray", "prepare", "start_workers", "load", "train", "evaluate", "checkpoint", "total")
    table.add_row("time", ", ".join(f"{name.replace('_', ' ')} {duration(phases[name])}" for name in shown))
    table.add_row("waiting for data", f"{phases['data_wait']:.2f} s")
    table.add_row("final model", f"{result.final} (step {result.chosen_step})")
    target.print(table)
    for line in (
        f'finray generate {result.run_dir} "your prompt"',
        f"finray evaluate {result.run_dir}",
        f"finray export {result.run_dir} --output DIR",
    ):
        target.print(f"next: {line}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def steps(target: Console) -> Iterator[Progress]:
    """One line of progress for each part of an evaluation."""
    status = target.status("evaluating") if target.is_terminal else None

    def update(what: str, done: int, *, total: int) -> None:
        if status is not None:
            status.update(f"{what}: {done}/{total}")
        elif done == total:
            target.print(f"{what}: {total} rows", highlight=False)

    with status or nullcontext():
        yield update


def comparison(target: Console, result: Comparison, *, samples: int) -> None:
    """Scores of base and tuned model, and some answers side by side."""
    table = Table(title=f"{result.rows} held-out rows", title_justify="left")
    for column in ("", "base", "tuned"):
        table.add_column(column, justify="left" if not column else "right")
    for name, base in result.base.metrics.items():
        table.add_row(name.replace("_", " "), f"{base:.1%}", f"{result.tuned.metrics[name]:.1%}")
    table.add_row("loss", f"{result.base.loss:.4f}", f"{result.tuned.loss:.4f}")
    table.add_row("perplexity", f"{result.base.perplexity:.3f}", f"{result.tuned.perplexity:.3f}")
    target.print(table)
    for prediction in result.predictions[:samples]:
        target.rule(style="dim")
        for label, key in (("prompt", "prompt"), ("expected", "reference"), ("base", "base"), ("tuned", "tuned")):
            target.print(f"[bold]{label:>9}[/bold] ", end="")
            target.print(getattr(prediction, key).strip(), markup=False, highlight=False, soft_wrap=True)
    target.print(f"\npredictions: {result.folder / 'predictions.jsonl'}", highlight=False, soft_wrap=True)


def answers(target: Console, prompts: Sequence[Prompt], texts: Sequence[str], output: Path | None) -> None:
    """Print answers, or write them as JSONL."""
    if output is None:
        for text in texts:
            target.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    rows = [
        {**({"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.text}), "answer": text}
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    try:
        output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise DataError(f"the answers cannot be written: {error.strerror}", where=str(output)) from None
    target.print(f"wrote {len(rows)} answers to {output}", highlight=False, soft_wrap=True)
