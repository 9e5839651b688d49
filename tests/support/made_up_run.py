"""A training loop over made-up steps, with clocks, writers and trackers that are made up too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finray.config.load import build_config
from finray.config.objectives import SFT
from finray.config.resolved import Precision, Resolved
from finray.config.tasks import CAUSAL_LM
from finray.parallel.ddp import DDPStrategy
from finray.training import loop as module
from finray.training.loader import StepData
from finray.training.loop import Loop
from finray.training.profile import Profiler
from finray.training.state import TrainState

CPU = torch.device("cpu")
# Of each step: the mean loss, and the weight by which it counts. Not the same twice.
LOSSES = [4.0, 3.5, 3.25, 2.0, 2.5, 1.0, 1.5, 0.5, 0.75, 0.25]
WEIGHTS = [2, 6, 3, 8, 4, 10, 5, 7, 9, 12]


class Run:
    """A loop over made-up steps: a forward pass takes two seconds, an evaluation five, a snapshot three.

    Args:
        passes_s: seconds of a forward pass, if they are not two.
        scores_s: seconds of an evaluation, if they are not five.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        steps: int = 10,
        held_out: list[float] | None = None,
        losses: list[float] = LOSSES,
        best: tuple[str, Any] = ("eval_loss", "min"),
        stop_at: int | None = None,
        precision: Precision = "fp32",
        state: TrainState | None = None,
        writes: bool = True,
        passes_s: float = 2.0,
        scores_s: float = 5.0,
        **config: Any,
    ) -> None:
        self.now, self.said, self.saved, self.reported = 0.0, [], [], []  # type: ignore[var-annotated]
        self.held_out = list(held_out or [])
        self.modes: list[bool] = []
        plain: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "d"}}
        plain["train"] = {"schedule": "constant", "warmup_steps": 0, "learning_rate": 0.5, "max_steps": steps}
        if held_out is not None:
            plain["data"]["eval_ratio"] = 0.1
        plain |= {name: {**plain.get(name, {}), **section} for name, section in config.items()}
        model = torch.nn.Linear(1, 1, bias=False)
        weight = model.weight
        torch.nn.init.ones_(weight)

        def loss_sum(outputs: None, batch: Any, sums: torch.Tensor) -> torch.Tensor:
            self.now += passes_s
            self.modes.append(model.training)
            # The weight stays one: the optimizer below changes nothing.
            return weight.sum() * batch.loss

        def score(outputs: None, batch: Any, sums: torch.Tensor) -> None:
            self.now += scores_s
            self.modes.append(model.training)
            sums += batch.loss

        def at(position: int) -> StepData:
            step = position // 3
            batch = SimpleNamespace(loss=losses[step] * WEIGHTS[step], to=lambda device: batch)
            return StepData([(0, batch)], WEIGHTS[step], WEIGHTS[step] + 1, 100 * (step + 1), (step, step + 50), 3)

        def batches() -> Any:
            batch = SimpleNamespace(loss=self.held_out.pop(0), to=lambda device: batch)
            return [(batch, True)]

        task: Any = SimpleNamespace(
            spec=replace(CAUSAL_LM, best=best),
            model=model,
            layout=None,
            outputs=lambda batch: None,
            in_step=None,
            objective=SimpleNamespace(
                spec=SFT,
                metric_count=lambda rows: 1,
                loss_sum=loss_sum,
                score=score,
                metrics=lambda sums: {best[0]: sums[0]},
                confusion=lambda sums: [],
                recorded=lambda sums, weight: {},
            ),
        )
        evaluation: Any = SimpleNamespace(batches=batches, batches_before=list, weight=77, rows=4, passes=1)
        optimizer: Any = SimpleNamespace(parameters={"w": weight}, rates=[])

        def update(rate: float, *, found_inf: torch.Tensor) -> None:
            optimizer.rates.append((rate, float(found_inf)))
            weight.grad = None

        optimizer.step = update
        self.rates = optimizer.rates
        self.trackers: Any = SimpleNamespace(log=self.said.append, is_behind=False, keep=lambda: None)
        writer: Any = SimpleNamespace(is_done=False, close=lambda: self.said.append("closed"))
        pending: list[Any] = []

        def begin(snapshot: Any, *, step: int, metrics: dict[str, float]) -> None:
            assert not pending
            pending.append(SimpleNamespace(path=Path(f"c{step}"), step=step, metrics=metrics))
            writer.is_done = writes
            self.saved.append((step, metrics, snapshot))

        def finish() -> Any:
            writer.is_done = False
            return pending.pop() if pending else None

        writer.begin, writer.finish = begin, finish

        def snapshot(
            layout: Any, optimizer: Any, state: TrainState, strategy: Any, *, others: Any, buffers: Any
        ) -> str:
            self.now += 3.0
            return f"{state.step} {'behind' if buffers is not None else 'at once'}"

        monkeypatch.setattr(module, "take_snapshot", snapshot)
        monkeypatch.setattr(module, "peak_memory", lambda device: 123)
        config_of_run = build_config(plain, source="test")
        rate = float(config_of_run.train.learning_rate)
        self.loop = Loop(
            config=config_of_run,
            task=task,
            strategy=DDPStrategy(CPU),
            optimizer=optimizer,
            source=SimpleNamespace(at=at, items_per_epoch=7, is_ahead=True),  # type: ignore[arg-type]
            evaluation=None if held_out is None else evaluation,
            total_steps=steps,
            state=state or TrainState(),
            writer=writer,
            trackers=self.trackers,
            save_extras=lambda folder: None,
            reported=lambda path, metrics: self.reported.append((str(path), metrics)),
            resolved=Resolved(precision, None, None, True, "ddp", False, learning_rate=rate),
            best_metric=task.spec.chosen(config_of_run.evaluation),
            clock=lambda: self.now,
            profiler=Profiler(None, Path(), DDPStrategy(CPU), notify=lambda text: None),
            has_request=lambda: self.loop.state.step + 1 == stop_at,
        )

    def run(self) -> Run:
        self.loop.run()
        assert self.said.pop() == "closed"
        return self

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.said if isinstance(one, kind)]


Make = Callable[..., Run]
