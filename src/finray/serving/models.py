"""The models of a server: by name, all on one base model, each prompted as it was trained."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finray.checkpoint.copies import local_copy, named_run
from finray.checkpoint.rundir import CONFIG_FILE, FINAL
from finray.config.adapter_files import SETTINGS
from finray.config.paths import is_url
from finray.config.schema import ModelConfig
from finray.config.tasks import SPECS
from finray.errors import ConfigError, ModelError
from finray.evaluation.artifacts import artifact_of, find_artifact, inference_device, inference_dtype
from finray.evaluation.engines import joins_gpus
from finray.evaluation.engines.base import Loading
from finray.evaluation.engines.sampling import Sampling, end_tokens
from finray.evaluation.engines.transformers import TransformersEngine
from finray.evaluation.engines.vllm import VLLMEngine
from finray.evaluation.generate import Asking
from finray.models.artifacts import Artifact, load_artifact, merge_adapter, require_finite
from finray.models.loading import DTYPES, load_model
from finray.models.many_adapters import ManyAdapters, PlainLora, read_plain_lora
from finray.pretrained.tokenizers import load_tokenizer
from finray.serving.access import LOOPBACK, Access
from finray.serving.adding import Attempt, named_place, require_inside
from finray.serving.batching import Batcher, Queue
from finray.serving.errors import ApiError, no_model
from finray.serving.protocol import model_document
from finray.serving.vllm import VLLMBatcher

ENGINES = ("auto", "transformers", "vllm")
# Name of an adapter's base model.
BASE = "base"
# A revision that is not named.
_MAIN = "main"
# Adapters in one batch of vLLM, and the maximum rank if adapters may be added later.
_LORAS, _RANK = 8, 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of `finray serve`.

    Attributes:
        model: run, checkpoint or model directory, or a Hub id.
        name: name to serve it under; None for that of its directory.
        adapters: names of more adapters, with their directories.
        base: overrides the base model of adapters.
        slots: maximum number of rows processed at the same time.
        max_queue: maximum number of rows waiting for a slot.
        max_length: maximum tokens of a prompt and its answer; None for the model's limit.
        max_new_tokens: default for a conversation.
        dtype: of weights and arithmetic: fp32 or bf16; None for the default for inference on this machine.
        engine: ``transformers``, ``vllm``, or ``auto`` (vLLM if it is installed).
        key_env: environment variable with the API key; None for no key.
        host: address at which the server listens.
        allow_hosts: further names by which clients address it.
        adapters_from: directories and URLs from which requests may add adapters; none means that requests change
            nothing.
        max_adapters: maximum number of adapters that there are by requests.
        load_s: seconds that loading one of them may take.
        trusted: what the user has accepted (:func:`finray.config.trust.accepted`), for the process of the models.
    """

    model: str
    name: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    base: str | None = None
    slots: int = 32
    max_queue: int = 256
    max_length: int | None = None
    max_new_tokens: int = 512
    dtype: str | None = None
    engine: str = "auto"
    key_env: str | None = None
    host: str = "127.0.0.1"
    allow_hosts: tuple[str, ...] = ()
    adapters_from: tuple[str, ...] = ()
    max_adapters: int = 32
    load_s: float = 300.0
    trusted: frozenset[str] = frozenset()


def api_key(name: str) -> bytes:
    """The key that clients must send, from an environment variable, without white space around it.
    Raises ConfigError: there is none, or no header can hold it."""
    value = os.environ.get(name)
    # A mounted secret often ends in a newline.
    key = (value or "").strip()
    if value is None:
        problem = f"the environment has no variable {name}"
    elif not key:
        problem = f"the variable {name} holds no key"
    elif not (key.isascii() and key.isprintable()):
        problem = f"the key in {name} has not only ASCII letters, digits and signs, and clients cannot send it"
    else:
        return key.encode()
    raise ConfigError(problem, where="--api-key-env", repair=f"export {name}=... with the key that clients must send")


@dataclass(frozen=True, slots=True)
class Served:
    """A served model.

    Attributes:
        name: name in requests.
        source: run, directory or Hub id that it was loaded from.
        asking: how it is prompted.
        ends: tokens that end its answers.
        adapter: adapter to apply, as named in the engine; None for the base model.
        created: seconds since 1970.
    """

    name: str
    source: str
    asking: Asking
    ends: frozenset[int]
    adapter: Any | None
    created: int

    def document(self, max_length: int | None) -> dict[str, Any]:
        """As listed by `/v1/models`; of a path only the last component."""
        parent = None if self.adapter is None else BASE
        return model_document(self.name, self.source, self.created, parent=parent, max_length=max_length)


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to serve, checked before any weights are read.

    Attributes:
        name: of the model.
        artifact: its weights.
        is_classifier: whether it is a classifier.
        adapters: the additional ones.
    """

    name: str
    artifact: Artifact
    is_classifier: bool
    adapters: tuple[tuple[str, Artifact], ...]


def find(settings: ServeSettings) -> ServePlan:
    """Check everything that is to be served.
    Raises FinrayError: something is missing, incomplete, damaged or incompatible."""
    if settings.engine not in ENGINES:
        raise ConfigError(f"unknown engine `{settings.engine}`", where="--engine", repair=f"use {', '.join(ENGINES)}")
    if settings.engine == "vllm":
        VLLMEngine.require()
    require_places(settings)
    Access(None, host=settings.host, names=settings.allow_hosts)
    model, base = local_copy(named_run(settings.model)), settings.base
    if settings.adapters and not _is_adapter(model):
        # It is that of the adapters beside this model.
        base = None
    artifact = artifact_of(model, base=base)
    name = checked_name(settings.name or name_of(settings.model), where="--name")
    if name == BASE and artifact.is_adapter:
        raise ConfigError(
            f"`{BASE}` is the name of the model under the adapter",
            where="--name" if settings.name else settings.model,
            repair="give the adapter another name with --name",
        )
    task = artifact.model.task
    is_classifier = task in SPECS and SPECS[task].adds_head
    if is_classifier and (settings.adapters or settings.adapters_from):
        raise ConfigError(
            "a classifier cannot be served with adapters",
            where="--adapter" if settings.adapters else "--adapters-from",
            repair="start a separate server for each classifier",
        )
    if is_classifier and settings.engine == "vllm":
        raise ConfigError(
            "vLLM does not run classifiers", where="--engine vllm", repair="leave out --engine, or use transformers"
        )
    if not is_classifier:
        Asking.of(artifact, load_tokenizer(ModelConfig(name=str(artifact.folder))))
    names, adapters = {name, BASE}, list[tuple[str, Artifact]]()
    for given, path in settings.adapters:
        if checked_name(given, where="--adapter") in names:
            raise ConfigError(f"two models are named `{given}`", where="--adapter", repair="give each a different name")
        names.add(given)
        adapters.append((given, find_adapter(path, of=artifact.model, base=settings.base)))
    return ServePlan(name, artifact, is_classifier, tuple(adapters))


def require_places(settings: ServeSettings) -> None:
    """Check the places from which requests may add adapters.
    Raises ConfigError: one is no directory, or everybody who reaches the server could add adapters."""
    if settings.adapters_from and settings.key_env is None and settings.host not in LOOPBACK:
        raise ConfigError(
            "everybody who reaches this address could add adapters",
            where="--adapters-from",
            repair="require a key with --api-key-env NAME, or listen on 127.0.0.1",
        )
    for place in settings.adapters_from:
        if not is_url(place) and not Path(place).expanduser().is_dir():
            raise ConfigError(
                f"`{place}` is not a directory", where="--adapters-from", repair="--adapters-from runs, for those in it"
            )


def find_adapter(path: str, *, of: ModelConfig, base: str | None) -> Artifact:
    """An adapter's directory; it must name the served base model.
    Raises FinrayError: it is missing, damaged, not an adapter, or for another base model."""
    path = str(local_copy(path))
    artifact = find_artifact(path, base=base if _is_adapter(path) else None)
    if artifact.base is None:
        raise ModelError("is a full model, not an adapter", where=path, repair="start a separate server for it")
    if base is None and _place(artifact.base) != _place(of):
        trained, here = (
            f"{model.name} (revision {model.revision})" if model.revision else model.name
            for model in (artifact.base, of)
        )
        raise ModelError(
            f"the adapter has a different base model: it was trained on {trained}, but {here} is served",
            where=path,
            repair="serve it with its own base model; use --base if the same model now has another name",
        )
    return artifact


def _is_adapter(path: str | Path) -> bool:
    """Whether a directory is that of an adapter: its own, or a run's."""
    folder = Path(path).expanduser()
    return any(file for place in ("", f"{FINAL}/", "checkpoint-*/") for file in folder.glob(f"{place}{SETTINGS}"))


def _place(model: ModelConfig) -> tuple[str, str, tuple[str, ...]]:
    path = Path(model.name).expanduser()
    name = str(path.resolve()) if path.exists() else model.name
    return name, model.revision or _MAIN, tuple(model.new_tokens)


def name_of(model: str) -> str:
    """The default name of a run, checkpoint or model directory, or Hub id."""
    if "://" in model:
        model = model.rstrip("/").rpartition("/")[2]
    path = Path(model).expanduser()
    if not path.is_dir():
        return model
    path = path.resolve()
    if path.name == FINAL and (path.parent / CONFIG_FILE).exists():
        path = path.parent
    return re.sub(r"[^A-Za-z0-9._:/-]", "-", path.name).lstrip("._:/-") or "model"


def checked_name(name: str, *, where: str) -> str:
    """Check a name, which clients put into URL paths; ``where`` it was given.
    Raises ConfigError: it is not a valid name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"`{name[:80]}` cannot be the name of a model",
            where=where,
            repair="use up to 128 letters, digits, dots, dashes, underscores, colons and slashes",
        )
    return name


class Models:
    """The models of a running server: one engine, one batch, and adapters by name.

    Args:
        settings: of the server.
        plan: what to serve, from :func:`find`.
        notify: called with messages for the user, one line each.
        clock: seconds since 1970.

    Raises:
        FinrayError: a model cannot be loaded.
    """

    def __init__(
        self,
        settings: ServeSettings,
        plan: ServePlan,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._artifact, self._base = plan.artifact, plan.artifact.model
        lora = self._shared_lora(plan, notify)
        self._is_open = lora is not None or not plan.artifact.is_adapter
        others = [(artifact, read_plain_lora(artifact.folder, self._base)) for _, artifact in plan.adapters]
        tokenizer = load_tokenizer(ModelConfig(name=str(plan.artifact.folder)))
        vllm = self._vllm(lora, [weights for _, weights in others], notify)
        if vllm is None:
            self._open(lora, tokenizer, notify)
        limits = [limit for limit in (settings.max_length, self.own_length) if limit is not None]
        self.max_length = min(limits, default=None)
        self._changes = threading.Lock()
        self._served: Mapping[str, Served] = {}
        placed = None if lora is None else self._placed(plan.artifact.folder, lora)
        self._put(self._made(plan.name, settings.model, plan.artifact, tokenizer, placed))
        if lora is not None:
            base = artifact_of(self._base.name, revision=self._base.revision)
            self._put(self._made(BASE, self._base.name, base, load_tokenizer(self._base), None))
        for (name, artifact), (_, weights) in zip(plan.adapters, others, strict=True):
            self._put(self._adapter(name, artifact, self._placed(artifact.folder, weights)))
        self._at_start = frozenset(self._served)
        if without := [
            f"`{model.name}` {why}" for model in self.all() if (why := model.asking.why_no_chat) is not None
        ]:
            notify(f"conversations need a chat template, so they are refused: {', '.join(without)}")
        for served in self.all():
            if served.asking.remark is not None:
                notify(f"`{served.name}`: {served.asking.remark}")

    def _open(self, lora: PlainLora | None, tokenizer: Any, notify: Callable[[str], None]) -> None:
        """Load the model into finray's own engine."""
        settings, device = self._settings, inference_device()
        dtype = DTYPES[settings.dtype] if settings.dtype else inference_dtype(None, device)
        if self._artifact.is_adapter and lora is None:
            model = merge_adapter(load_artifact(self._artifact, dtype=dtype)).to(device).eval()
        else:
            model = load_model(self._base, dtype=dtype).to(device).eval()
        require_finite(model, self._base.name)
        engine = TransformersEngine.of(model, tokenizer, batch_size=settings.slots, notify=notify)
        adapters = ManyAdapters(model)
        if engine.has_slots:
            # The first step compares the head with the model's own, so it must run without adapters.
            list(engine.generate([[0]], Sampling(1)))
        self.engine: TransformersEngine | VLLMEngine = engine
        self.has_logprobs, self.own_length, self._generation = (
            engine.has_slots,
            engine.max_length,
            model.generation_config,
        )
        self.vocabulary = engine.vocabulary
        self.batcher: Queue = Batcher(engine, adapters, slots=settings.slots, max_queue=settings.max_queue)
        self._placed: Callable[[Path, PlainLora], Any] = lambda folder, lora: adapters.placed(lora)

    def _vllm(
        self, lora: PlainLora | None, others: Sequence[PlainLora], notify: Callable[[str], None]
    ) -> VLLMEngine | None:
        """The model in vLLM, if requested, or if installed and able to run it."""
        settings = self._settings
        if not joins_gpus(settings.engine):
            return None
        dtype = DTYPES[settings.dtype] if settings.dtype else None
        # An adapter with more than plain LoRA is merged, as without vLLM.
        merge = self._artifact.is_adapter and lora is None
        loading = Loading.of(self._artifact, batch_size=settings.slots, merge=merge, dtype=dtype, notify=notify)
        rank = max(
            [
                _RANK if settings.adapters_from and self._is_open else 0,
                *(part.down.shape[0] for adapter in (lora, *others) if adapter for part in adapter.parts.values()),
            ]
        )
        try:
            engine = VLLMEngine(loading, loras=_LORAS, rank=rank, max_length=settings.max_length)
        except ModelError as error:
            if settings.engine == "vllm":
                raise
            notify(f"using finray's own engine: {error.message}")
            return None
        self.engine, self.has_logprobs, self.vocabulary = engine, True, engine.vocabulary
        self.own_length, self._generation = engine.max_length, engine.generation
        self.batcher = VLLMBatcher(engine, slots=settings.slots, max_queue=settings.max_queue)
        self._placed = lambda folder, lora: engine.adapter(folder)
        return engine

    def _shared_lora(self, plan: ServePlan, notify: Callable[[str], None]) -> PlainLora | None:
        """The model's own adapter, if it can run next to others."""
        if not plan.artifact.is_adapter:
            return None
        try:
            return read_plain_lora(plan.artifact.folder, self._base)
        except ModelError as error:
            if plan.adapters or "more than LoRA" not in error.message:
                raise
            notify(f"the adapter is merged into its base model and served by itself: {error.message}")
            return None

    def _made(self, name: str, source: str, artifact: Artifact, tokenizer: Any, adapter: Any | None) -> Served:
        ends = end_tokens(tokenizer, self._generation)
        return Served(name, source, Asking.of(artifact, tokenizer), ends, adapter, int(self._clock()))

    def _adapter(self, name: str, artifact: Artifact, placed: Any) -> Served:
        tokenizer = load_tokenizer(ModelConfig(name=str(artifact.folder)))
        return self._made(name, str(artifact.folder), artifact, tokenizer, placed)

    def _put(self, model: Served) -> None:
        # A new mapping each time: requests read it without a lock.
        self._served = {**self._served, model.name: model}

    def names(self) -> list[str]:
        """Names of the served models."""
        return list(self._served)

    def all(self) -> list[Served]:
        """The models, in the order in which they were added."""
        return list(self._served.values())

    def get(self, name: str) -> Served:
        """A model by name. Raises ApiError: there is no such model; the message lists the available ones."""
        served = self._served.get(name)
        if served is None:
            raise no_model(name, self._served, param="model")
        return served

    def add(self, name: str, path: str, attempt: Attempt) -> Served:
        """Add an adapter, unless the attempt is given up meanwhile.
        Raises FinrayError: it cannot be loaded, or does not fit the base model; ApiError: its path is not in a named
        place."""
        places = self._settings.adapters_from
        place = named_place(path, places)
        if not is_url(place):
            require_inside(Path(place), places)
        artifact = find_adapter(place, of=self._base, base=self._settings.base)
        if not is_url(place):
            require_inside(artifact.folder.resolve(), places)
        lora = read_plain_lora(artifact.folder, self._base)

        def placed() -> Any:
            attempt.require()
            return self._placed(artifact.folder, lora)

        made = self._adapter(name, artifact, self.batcher.call(placed).result())
        with self._changes:
            self.require_room_for(name)
            if attempt.end():
                self._put(made)
        return made

    def require_room_for(self, name: str) -> None:
        """Check that an adapter of this name can be added.
        Raises FinrayError: it is not a valid name; ApiError: the name is taken, there are too many adapters, or this
        server takes none."""
        self._require_open()
        checked_name(name, where="name")
        if name in self._served or name == BASE:
            raise ApiError(409, self._why_taken(name), param="name")
        most = self._settings.max_adapters
        if len(self._served.keys() - self._at_start) >= most:
            message = f"requests have added {most} adapters, as many as --max-adapters allows; remove one first"
            raise ApiError(409, message, param="name")

    def _why_taken(self, name: str) -> str:
        if self._is_removable(name):
            return f"a model `{name}` already exists; remove it first"
        is_first = name == next(iter(self._served))
        what = "the model that the server was started with" if is_first else "the name of the model under an adapter"
        return f"`{name}` is {what}; choose another name"

    def _is_removable(self, name: str) -> bool:
        served = self._served.get(name)
        return served is not None and served.adapter is not None and name != next(iter(self._served))

    def remove(self, name: str) -> None:
        """Remove an adapter; its running answers finish.
        Raises ApiError: there is no such adapter, or it cannot be removed."""
        with self._changes:
            self._require_open()
            if not self._is_removable(self.get(name).name):
                raise ApiError(403, f"`{name}` was loaded at start and cannot be removed", param="name")
            self._served = {served: model for served, model in self._served.items() if served != name}

    def _require_open(self) -> None:
        if not self._settings.adapters_from:
            message = "requests can add and remove adapters only if `finray serve --adapters-from DIR` allows it"
            raise ApiError(403, message, code="adapters_not_allowed")
        if not self._is_open:
            raise ApiError(403, "the model's own adapter is merged into it, so no other can be added")
