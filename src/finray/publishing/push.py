"""Pushing a run, a checkpoint or a model directory to the Hub."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from finray.checkpoint import manifest
from finray.checkpoint.rundir import RunDir, saved_config
from finray.config.adapter_files import with_base
from finray.config.export import hub_id
from finray.config.schema import Config
from finray.config.trust import of_stranger, require_trusted
from finray.errors import HubError
from finray.evaluation.artifacts import export_model, find_artifact
from finray.evaluation.subjects import files_of
from finray.files import FileKind, digest_of, lies_in, require_writable
from finray.models.artifacts import Artifact
from finray.publishing.card import ModelFacts, card, scores_of
from finray.publishing.hub import DOCUMENTS, MARK, MODEL, Hub, Target, public_name
from finray.results import Result
from finray.tracking.starts import read_starts

Notify = Callable[[str], None]
_FILES = FileKind(HubError, repair="take the file from where the model was made")


@dataclass(frozen=True, slots=True)
class Pushed(Result):
    """The result of a push.

    Attributes:
        url: of the model.
        repo: its name, ``OWNER/NAME``.
        commit: that it is in.
        private: whether the model is private.
        merged: whether an adapter was merged first.
        files: number of files.
        bytes: total size.
    """

    url: str
    repo: str
    commit: str
    private: bool
    merged: bool
    files: int
    bytes: int

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    def print(self, console: Console) -> None:
        """Where it is."""
        seen = "private" if self.private else "public"
        text = (
            f"pushed {self.files} files ({self.bytes / 1e6:,.1f} MB) to {self.url} ({seen}), commit {self.commit[:12]}"
        )
        console.print(text, highlight=False, soft_wrap=True)


def push(
    path: str | Path,
    *,
    to: str | None = None,
    merged: bool | None = None,
    public: bool | None = None,
    dtype: str = "bf16",
    base: str | None = None,
    notify: Notify = lambda text: None,
    login: Callable[[], Hub] = Hub.login,
) -> Pushed:
    """Push the weights of a directory, with a model card. The same call finishes a push that was killed.

    Args:
        path: a run, checkpoint or model directory.
        to: name of the model on the Hub; without an owner, the user's. None uses ``export.push_to_hub``, else the name
            of the run or directory.
        merged: merge an adapter into its base; None uses ``export.merged``.
        public: make the model public; None uses ``export.public``.
        dtype: dtype of merged weights: fp32, bf16 or fp16.
        base: the base model's name on the Hub, or its directory if it has moved; None uses ``export.base_model``.
        notify: called with progress messages.
        login: creates the Hub connection.

    Raises:
        FinrayError: the Hub does not allow the push (checked before anything is merged or sent), or does not answer.
    """
    artifact = find_artifact(path)
    run = RunDir(artifact.folder.parent)
    is_of_a_run = run.config_file.is_file() and (artifact.folder / manifest.NAME).is_file()
    config = saved_config(run) if is_of_a_run else None
    if config is not None:
        asked = {"export.push_to_hub": to, "export.public": public, "export.base_model": base}
        config = of_stranger(config, config.foreign[0], said=[name for name in asked if asked[name] is not None])
        require_trusted(config, "export")
    export = None if config is None else config.export
    merged = bool(export and export.merged) if merged is None else merged
    public = bool(export and export.public) if public is None else public
    run_name = artifact.folder.name if config is None else config.run.name
    name = to or (export and export.push_to_hub) or run_name
    try:
        hub_id(name)
    except ValueError as error:
        raise HubError(str(error), where="--to" if to else name, repair="give the name with --to OWNER/NAME") from None
    base_model = base_name(artifact, base or (None if export is None else export.base_model), merged=merged)
    hub = login()
    target = hub.check(name, public=public)
    if public and target.is_private:
        notify(f"{target.repo} is private on the Hub and stays private; make it public in its settings there")
    facts = _facts(artifact, run, config, target, merged=merged, base=base_model, hub=hub)
    whole, files = None, model_files(artifact.folder)
    if merged:
        local = base if base is not None and Path(base).expanduser().is_dir() else None
        whole = _merged(artifact, dtype=dtype, base=local, notify=notify)
        files = model_files(whole)
    elif artifact.base is not None and base_model is not None:
        files |= {name: text.encode() for name, text in with_base(artifact.folder, base_model).items()}
    mark = files.get(MARK)
    text = _FILES.read(mark) if isinstance(mark, Path) else mark
    notes = dict(artifact.notes) if text is None else json.loads(text)
    for field in ("base_model", "merged_onto"):
        # The directory of a base model on this machine says nothing to others.
        if isinstance(name_here := notes.get(field), str):
            notes[field] = public_name(name_here, base_model, merged=True)
    files[MARK] = (json.dumps(notes, indent=2) + "\n").encode()
    if "README.md" not in files or config is not None:
        files["README.md"] = card(facts).encode()
    size = sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values())
    notify(f"pushing {len(files)} files ({size / 1e6:,.1f} MB) to {hub.endpoint}/{target.repo}")
    step = "" if facts.step is None else f" of step {facts.step}"
    message = f"{'Merged model' if merged else 'Model'}{step} from finray {version('finray')}"
    try:
        commit = hub.push(target, files, message=message)
    except KeyboardInterrupt as stop:
        stop.add_note("files that arrived are not sent again")
        raise
    if whole is not None:
        shutil.rmtree(whole, ignore_errors=True)
    return Pushed(f"{hub.endpoint}/{target.repo}", target.repo, commit.oid, target.is_private, merged, len(files), size)


def base_name(artifact: Artifact, named: str | None, *, merged: bool) -> str | None:
    """The Hub name of an adapter's base; None if it is a local directory and no name is needed.
    Raises ModelError: the adapter alone would be pushed, and nobody could load it."""
    return public_name(None if artifact.base is None else artifact.base.name, named, merged=merged)


def model_files(folder: Path) -> dict[str, Path | bytes]:
    """The files of a model directory to push, by name.
    Raises HubError: one is a link to a file elsewhere; in a directory of somebody else it may be any file of this
    machine."""
    files = {path for pattern in (*MODEL, *DOCUMENTS) for path in folder.glob(pattern) if path.is_file()}
    if elsewhere := sorted(file for file in files if not lies_in(file, folder)):
        raise HubError(
            f"`{elsewhere[0].name}` is a link to a file outside its directory ({elsewhere[0].resolve()})",
            where=str(folder),
            repair="if it is to be published, put a copy in its place",
        )
    return {file.relative_to(folder).as_posix(): file for file in sorted(files)}


def _facts(
    artifact: Artifact, run: RunDir, config: Config | None, target: Target, *, merged: bool, base: str | None, hub: Hub
) -> ModelFacts:
    folder = artifact.folder
    fields: dict[str, Any] = {}
    if config is not None:
        content, done, resolved = manifest.read(folder), run.finished(), run.resolved()
        fields = {
            "config": config,
            "resolved": {} if resolved is None else asdict(resolved),
            "workers": next((start.header.world_size for start in reversed(read_starts(run.path))), None),
            "summary": None if done is None else done.summary.json(),
            "step": content["step"],
            "metrics": content["metrics"],
        }
        if artifact.base is None:
            base = base or public_name(config.model.name, None, merged=True)
    return ModelFacts(
        target.repo,
        artifact,
        merged,
        base,
        version("finray"),
        card={} if base is None else hub.card_of(base),
        scores=scores_of(folder.parent if config is not None else folder, folder),
        **fields,
    )


def _merged(artifact: Artifact, *, dtype: str, base: str | None, notify: Notify) -> Path:
    """The model for ``--merged``. It is kept until it is pushed: after a kill it is not merged again."""
    name, stale = artifact.folder.name, list[Path]()
    if artifact.base is not None:
        # Whatever goes into it: weights, settings, tokenizer and templates of the adapter, the base, and who merges.
        digests = {
            name: digest_of(file) for name, file in model_files(artifact.folder).items() if isinstance(file, Path)
        }
        by = [version(package) for package in ("finray", "peft", "transformers", "torch")]
        onto = [artifact.base.model_dump(mode="json"), files_of(base or artifact.base.name)]
        first, second = (hashlib.sha256(json.dumps(part).encode()).hexdigest()[:12] for part in ([digests, by], onto))
        earlier = re.compile(rf"\.push-{re.escape(name)}-(?!{first})[0-9a-f]{{12}}-[0-9a-f]{{12}}-{dtype}")
        stale = [path for path in artifact.folder.parent.iterdir() if earlier.fullmatch(path.name)]
        name = f"{name}-{first}-{second}"
    output = artifact.folder.parent / f".push-{name}-{dtype}"
    if artifact.is_adapter and output.is_dir():
        notify(f"the merged model of an earlier push is in {output}")
        return output
    # Nobody asks again for what was merged from earlier files of the adapter, or by earlier versions.
    for folder in (output, *stale):
        shutil.rmtree(folder, ignore_errors=True)
    require_writable(output.parent)
    notify("merging the adapter into its base" if artifact.is_adapter else f"writing the weights in {dtype}")
    export_model(artifact.folder, output, dtype=dtype, base=base)
    return output
