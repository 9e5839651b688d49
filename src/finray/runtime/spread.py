"""Runs an engine on several machines of a Ray cluster: each replica holds the whole model and is fed rows as it
finishes.

We do not use Ray Data's LLM batch inference (Ray 2.60). It runs only vLLM and SGLang, restarts them for each dataset,
while an evaluation asks for losses, answers and choices in turn, and cannot score given tokens with an adapter. Here
any engine can be spread, and the sample for a row does not depend on the replica that answers it.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from finray.config.environment import accept, secrets_of
from finray.config.load import Overrides
from finray.config.requests import EvaluationRequest
from finray.config.schema import ClusterConfig, ModelConfig
from finray.errors import ClusterError, ConfigError, FinrayError, ModelError
from finray.evaluation import compare
from finray.evaluation.engines import (
    Answer,
    Continuation,
    Engine,
    Likelihood,
    Sampling,
    joins_gpus,
    make_engine,
    require_engine,
)
from finray.evaluation.engines.base import Ids, Numbers, OnToken, check_continuations, check_prompts, mute
from finray.evaluation.outcome import Comparison
from finray.evaluation.subjects import Progress
from finray.models.artifacts import Artifact
from finray.planning.placement import room, share
from finray.pretrained.tokenizers import load_tokenizer
from finray.runtime.cluster import connected, remove_orphans
from finray.runtime.failures import describe, lost_process

WHERE = "--replicas"
# Replicas that may be lost in a row without any row being finished.
TRIES = 3
# Seconds to find a place for all replicas in the cluster.
_ROOM_S = 60
# Seconds until Ray's count of free resources shows that others have ended.
_SETTLE_S = 5
# And between two looks at it: nodes report to Ray's head ten times in a second.
_REPORT_S = 0.25


def evaluate(model: str | Path, overrides: Overrides, request: EvaluationRequest, *, progress: Progress) -> Comparison:
    """:func:`finray.evaluation.compare.evaluate`, with as many replicas of each engine as are asked for."""
    if request.replicas < 1:
        raise ConfigError(f"{request.replicas} replicas are none", where=WHERE, repair="give 1 or more")
    return compare.evaluate(
        model, overrides, request, progress=progress, spread=SpreadEngine if request.replicas > 1 else None
    )


class SpreadEngine:
    """See :class:`finray.evaluation.engines.base.Engine`.

    Args:
        replicas: how many. A lost one is replaced, and its unfinished rows are assigned again.
        cluster: where they run; without an address, and without ``RAY_ADDRESS``, a Ray of our own.
        others: arguments of :func:`finray.evaluation.engines.make_engine`.

    Raises:
        FinrayError: the engine is not installed, the model cannot be loaded, or the cluster has no room.
    """

    def __init__(
        self,
        name: str,
        artifact: Artifact,
        *,
        replicas: int,
        cluster: ClusterConfig,
        batch_size: int = 32,
        merge: bool = False,
        dtype: torch.dtype | None = None,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        require_engine(name)
        self.tokenizer = load_tokenizer(ModelConfig(name=str(artifact.folder)))
        self._count, self._batch_size, self._notify = replicas, batch_size, notify
        self.name, self.version = "", ""
        self.max_length: int | None = None
        # Replicas that are ready, and those that are starting, by the reference to their greeting; each with the
        # reference that is ready once it has a process.
        self._free: list[Any] = []
        self._starting: dict[Any, tuple[Any, Any]] = {}
        self._make: Callable[[], Any]
        self._about: _About | None = None
        self._lost = 0
        self._stack = ExitStack()
        with ExitStack() as stack:
            self._ray = ray = stack.enter_context(connected(cluster))
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            from finray.runtime import gcs

            address = ray.get_runtime_context().gcs_address
            remove_orphans(ray)
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            # For a moment Ray counts what the replicas of the model before had as theirs, and frees it node by node.
            least = {"CPU": 1} | ({"GPU": 1} if any(node.get("GPU") for node in nodes) else {})
            fit, before, until = room(nodes, least, most=replicas), None, time.monotonic() + _SETTLE_S
            with gcs.answering(where=WHERE):
                while True:
                    free = [*gcs.available_resources(address).values()]
                    is_steady = free == before and room(free, least, most=fit) >= fit
                    if is_steady or time.monotonic() > until:
                        break
                    before = free
                    time.sleep(_REPORT_S)
            each = share(nodes, replicas, free=free, one_gpu=not joins_gpus(name), where=WHERE)
            # When it is removed, Ray ends the replicas in it.
            group = ray.util.placement_group(
                [each] * replicas, strategy="SPREAD", name=f"finray-replicas {uuid4().hex[:8]}"
            )
            stack.callback(ray.util.remove_placement_group, group)
            if not group.wait(_ROOM_S):
                raise ClusterError(
                    f"others hold what {replicas} replicas of {each['CPU']} CPUs and {each.get('GPU', 0)} GPUs need",
                    where=WHERE,
                    repair="try again when they have ended, or ask for fewer",
                )
            made = ray.remote(_EngineReplica).options(
                num_cpus=each["CPU"],
                num_gpus=each.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group),
            )
            options = {"batch_size": batch_size, "merge": merge, "dtype": dtype}
            # Every machine must see these; a Hub model is downloaded by each.
            shared = [artifact.folder] * artifact.folder.exists()
            if artifact.base is not None and (base := Path(artifact.base.name).expanduser().absolute()).exists():
                # Actors have another working directory.
                artifact = replace(artifact, base=artifact.base.model_copy(update={"name": str(base)}))
                shared.append(base)
            self._make = lambda: made.remote(name, artifact, options, shared, each["CPU"], secrets_of())
            for _ in range(replicas):
                self._start()
            # Wait for all of them, so that a problem with one is reported before anything is computed.
            while self._starting:
                if self._lost:
                    self._require_place()
                self._greet(ray.wait(list(self._starting), num_returns=1)[0][0])
            assert self._about is not None
            self.version, self.max_length, self.weights = self._about.version, self._about.max_length, 0
            self.name = f"{self._about.name}, {replicas} replicas on Ray"
            for line in self._about.notes:
                notify(line)
            self._stack = stack.pop_all()

    def generate(
        self,
        prompts: Ids,
        sampling: Sampling,
        *,
        rows: Numbers = (),
        adapter: bool = True,
        on_token: OnToken = mute,
        logprobs: bool = False,
    ) -> Iterator[Answer]:
        """Answers in the order in which they finish; tokens are reported together with their answer."""
        numbers = list(rows or range(len(prompts)))
        check_prompts(prompts, numbers, self.max_length)
        by_number = {number: list(prompt) for number, prompt in zip(numbers, prompts, strict=True)}
        # Rows of similar length together, and the long ones first.
        numbers.sort(key=lambda number: -len(by_number[number]))

        def begin(replica: Any, part: list[int]) -> Any:
            method = replica.generate.options(num_returns="streaming")
            return method.remote([by_number[number] for number in part], sampling, part, adapter, logprobs)

        answers: Iterator[Answer] = self._each(numbers, begin)
        for answer in answers:
            for token in answer.tokens:
                on_token(answer.row, token)
            yield answer

    def log_likelihood(self, rows: Sequence[Continuation], *, adapter: bool = True) -> Iterator[Likelihood]:
        """Likelihoods in the order in which they finish; neighbours with one context go to the same replica."""
        check_continuations(rows, self.max_length)

        def begin(replica: Any, part: list[int]) -> Any:
            method = replica.log_likelihood.options(num_returns="streaming")
            return method.remote([rows[number] for number in part], part, adapter)

        return self._each(range(len(rows)), begin)

    def close(self) -> None:
        """End the replicas, and Ray if it is our own."""
        self._stack.close()

    def _each(self, rows: Sequence[int], begin: Callable[[Any, list[int]], Any]) -> Iterator[Any]:
        """Yield results as they finish; each replica gets more rows when it is done with its own."""
        from ray.exceptions import RayError, RayTaskError

        waiting, at_work = deque(rows), dict[Any, tuple[Any, dict[int, None]]]()
        while waiting or at_work:
            while waiting and self._free:
                # Many rows, so that a batch stays full; fewer towards the end, so that all replicas finish together.
                many = max(self._batch_size, len(waiting) // (2 * self._count))
                part = [waiting.popleft() for _ in range(min(many, len(waiting)))]
                replica = self._free.pop()
                at_work[begin(replica, part)] = replica, dict.fromkeys(part)
            if not at_work:
                self._require_place()
            ((ready, *_), _) = self._ray.wait([*at_work, *self._starting], num_returns=1)
            if ready in self._starting:
                self._greet(ready)
                continue
            replica, left = at_work[ready]
            try:
                result = self._ray.get(next(ready))
            except StopIteration:
                del at_work[ready]
                self._free.append(replica)
            except RayTaskError as error:
                raise _cause(error) from None
            except RayError as error:
                # The replica or its machine is lost, or a result that was not fetched yet.
                del at_work[ready]
                waiting.extendleft(reversed(left))
                self._replace(replica, error)
            else:
                del left[result.row]
                self._lost = 0
                yield result

    def _require_place(self) -> None:
        """Wait until one of the starting replicas has a process: loading may take as long as it needs, but there must
        be a machine that loads."""
        if not self._ray.wait([greeting for _, greeting in self._starting.values()], timeout=_ROOM_S)[0]:
            raise ClusterError(
                f"replicas were lost, and the cluster has had no room for another one for {_ROOM_S} s",
                where=WHERE,
                repair="start the lost machines again; the same command continues with what is kept",
            )

    def _start(self) -> None:
        replica = self._make()
        placed = replica.is_placed.remote()
        self._starting[replica.about.remote()] = replica, placed

    def _greet(self, reference: Any) -> None:
        """Add a replica that has loaded the model to those that get rows."""
        from ray.exceptions import RayError, RayTaskError

        replica, _ = self._starting.pop(reference)
        try:
            about: _About = self._ray.get(reference)
        except RayTaskError as error:
            raise _cause(error) from None
        except RayError as error:
            self._replace(replica, error)
            return
        first = self._about = self._about or about
        if (about.name, about.version) != (first.name, first.version):
            raise ClusterError(
                f"replicas would answer with {first.name} ({first.version}) and with {about.name} ({about.version})",
                where=WHERE,
                repair="install the same versions on all machines of the cluster",
            )
        self._free.append(replica)

    def _replace(self, replica: Any, error: Exception) -> None:
        """Replace a lost replica."""
        why, _ = lost_process(str(error)) or (describe(error), "")
        self._lost += 1
        if self._lost >= TRIES:
            raise ClusterError(
                f"{TRIES} replicas were lost and no row was finished in between: {why}",
                where=WHERE,
                repair="ask for fewer, or for a smaller --batch-size; the same command continues with what is kept",
            )
        self._notify(f"a replica was lost and is being replaced: {why}")
        # It may still be alive if only its machine is out of reach.
        self._ray.kill(replica)
        self._start()


def _cause(error: Any) -> Exception:
    """The exception that a replica raised."""
    return error.cause if isinstance(error.cause, FinrayError) else error


@dataclass(frozen=True, slots=True)
class _About:
    """A replica's description of its engine."""

    name: str
    version: str
    max_length: int | None
    notes: tuple[str, ...]
    pid: int


class _EngineReplica:
    """The actor: an engine on one machine. It loads on the first call, so that a failure to load is reported."""

    def __init__(
        self,
        name: str,
        artifact: Artifact,
        options: dict[str, Any],
        shared: Sequence[Path],
        threads: int,
        secrets: dict[str, str],
    ) -> None:
        accept(secrets)
        torch.set_num_threads(threads)
        self._made_from = name, artifact, options
        self._shared = shared
        self._notes: list[str] = []

    @cached_property
    def _engine(self) -> Engine:
        name, artifact, options = self._made_from
        for path in self._shared:
            if not path.exists():
                raise ModelError(
                    f"{socket.gethostname()} does not see the model",
                    where=str(path),
                    repair="put it on a disk that all machines of the cluster share",
                )
        return make_engine(name, artifact, notify=self._notes.append, **options)

    def is_placed(self) -> bool:
        return True

    def about(self) -> _About:
        engine = self._engine
        return _About(engine.name, engine.version, engine.max_length, tuple(self._notes), os.getpid())

    def generate(
        self, prompts: Ids, sampling: Sampling, rows: list[int], adapter: bool, logprobs: bool
    ) -> Iterator[Answer]:
        yield from self._engine.generate(prompts, sampling, rows=rows, adapter=adapter, logprobs=logprobs)

    def log_likelihood(self, request: Sequence[Continuation], rows: list[int], adapter: bool) -> Iterator[Likelihood]:
        for likelihood in self._engine.log_likelihood(request, adapter=adapter):
            yield replace(likelihood, row=rows[likelihood.row])
