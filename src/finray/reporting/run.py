"""Results of a training or a preparation, displayed on a terminal, in a notebook or as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from finray.checkpoint.rundir import RunDir, saved_config
from finray.config.objectives import REWARD
from finray.config.paths import run_url
from finray.config.tasks import SPECS
from finray.records import RunSummary
from finray.results import Result, Table
from finray.tracking.console import duration
from finray.tracking.jsonl import metrics_table

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class TrainResult(Result):
    """A finished run.

    Attributes:
        run_dir: the run directory.
        final: the finished model.
        chosen_step: step of the checkpoint that became final.
        summary: losses, seconds by phase, tokens/s, peak memory.
    """

    run_dir: Path
    final: Path
    chosen_step: int
    summary: RunSummary

    @property
    def metrics(self) -> pandas.DataFrame:
        """One row per recorded step: loss, learning rate, tokens/s, and evaluations as additional columns."""
        return metrics_table(self.run_dir)

    def model(self) -> tuple[Any, Any]:
        """The trained model, on the GPU if there is one, and its tokenizer, as plain Transformers or PEFT objects.
        Raises FinrayError: the model is missing or damaged."""
        from finray.evaluation.artifacts import load_trained

        return load_trained(self.final)

    def plain(self) -> dict[str, Any]:
        """The result as JSON types."""
        paths = {"run_dir": str(self.run_dir), "final": str(self.final)}
        return {**paths, "chosen_step": self.chosen_step, "summary": self.summary.json()}

    def print(self, console: Console) -> None:
        """The results, the duration of each phase, and next steps."""
        numbers = self.summary
        phases = numbers.phases
        table = Table(title="run finished", show_header=False, title_justify="left")
        table.add_row("steps", f"{numbers.step:,}")
        if numbers.final_loss is not None:
            first = (
                "the first step" if numbers.first_step == 1 else f"step {numbers.first_step}, the first of this start"
            )
            table.add_row("loss", f"{numbers.first_loss:.4f} at {first}, {numbers.final_loss:.4f} at the last")
        if numbers.mean_loss is not None:
            table.add_row("mean loss", f"{numbers.mean_loss:.4f} over all steps")
        if numbers.best is not None:
            table.add_row(f"best {numbers.best_metric.replace('_', ' ')}", f"{numbers.best:.4f}")
        table.add_row("tokens", f"{numbers.tokens:,} ({numbers.tokens_per_s:,.0f} tokens/s)")
        table.add_row(
            "peak memory", ", ".join(f"{peak / 2**30:.2f} GiB" for peak in numbers.peak_memory_bytes) + " by worker"
        )
        shown = ("start_ray", "prepare", "start_workers", "load", "train", "evaluate", "checkpoint", "total")
        table.add_row("time", ", ".join(f"{name.replace('_', ' ')} {duration(phases[name])}" for name in shown))
        table.add_row("waiting for data", f"{phases['data_wait']:.2f} s")
        table.add_row("final model", f"{self.final} (step {self.chosen_step})")
        console.print(table)
        config = saved_config(RunDir(self.run_dir))
        holds_out = numbers.best is not None or config.data.test_split or config.data.test_ratio
        # The commands that answer prompts and score text do not support other tasks.
        answers = config.model.task in SPECS and not SPECS[config.model.task].reads_labels
        rewards = config.train.objective == REWARD.name
        labels = config.model.task in SPECS and not answers and not rewards
        here = Path.cwd()
        nearest = self.run_dir.relative_to(here) if self.run_dir.is_relative_to(here) else self.run_dir
        run = shlex.quote(run_url(config) or str(nearest))
        for line, works in (
            (f'generate {run} "your prompt"', answers),
            (f'generate {run} "a text"', labels),
            (f"evaluate {run}", config.model.task in SPECS and holds_out),
            (f"serve {run}  # its /v1/classify labels texts", labels),
            (f"evaluate {run} --file answers.jsonl  # scores any answers", rewards),
            (f"serve {run}  # its /v1/score scores answers", rewards),
            (f"export {run} --output DIR", True),
        ):
            if works:
                console.print(f"next: finray {line}", highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class PreparedData(Result):
    """A prepared dataset: its directory or URL, and the report about it."""

    location: str
    splits: Mapping[str, Mapping[str, int]]
    notes: tuple[str, ...]
    exported: Mapping[str, int]

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    def print(self, console: Console) -> None:
        """In lines."""
        wrote = (f"wrote {rows:,} rows to {path}" for path, rows in self.exported.items())
        for line in (f"prepared: {self.location}", *self.notes, *wrote):
            console.print(line, highlight=False, soft_wrap=True)
