"""Whether the user of this machine has written the config of a run: only then what it names takes effect here.

A run directory may come from somebody else: pulled, unpacked, behind a URL. Its config may name code
(``package.module:Name``, ``run_code``, ``trust_remote_code``) and files of this machine. So a run that this user starts
is signed with a key of theirs, and of a run that is not signed every such field is refused where it would take effect,
unless the user sets it themselves or accepts the config (``--trust-run``). What is accepted is remembered by the digest
of its text, in a file of the user's: nothing in a run directory can say it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from finray.config.own_code import own_code
from finray.config.paths import is_template, is_url, run_path, run_url
from finray.config.schema import Config
from finray.errors import ConfigError, FinrayError
from finray.files import FileKind, replace_text

# In a run directory: the signature of its config.
SIGNATURE = "config.sig"
_CONFIG = "config.yaml"
# Files that a run writes in its directory; an interrupted run may lack any of them.
RUN_FILES = ("attempt", "run_id", "metrics.jsonl", "starts.jsonl", "failures.jsonl", "resolved.json", "summary.json")
# Any of these beside a config makes it that of a run, and not a file that the user has written.
_MARKS = (
    *RUN_FILES,
    SIGNATURE,
    *("checkpoint-*", "damaged-*", "final/*.json", "logs/training.log", "tensorboard/*tfevents*"),
    *("evaluation/metrics.json", "evaluation/*/metrics.json"),
)
_KEYS = FileKind(ConfigError, limit=1024, links=True)
_FILES = FileKind(ConfigError, limit=4_000_000)
# Texts that the user has accepted, by digest, a line each; and how many are remembered.
_DIGESTS = FileKind(ConfigError, limit=1_000_000, links=True)
_MOST = 10_000
# What the user has accepted in this process: SHA-256 of texts, and names of models on the Hub.
_ACCEPTED: set[str] = set()
# What is raised where there is no home directory, or where it cannot be written.
_NO_HOME = (OSError, RuntimeError, FinrayError)


def _user_file(name: str) -> Path:
    """A file of the user's, outside of every run."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "finray" / name


def _key(*, make: bool) -> bytes | None:
    with suppress(*_NO_HOME):
        # A copy of it on another machine makes the runs of both trusted on both.
        file = _user_file("key")
        key = _KEYS.read(file).strip() if file.exists() else None
        if make and (key is None or len(key) < 32):
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=file.parent) as scratch:
                scratch.write(secrets.token_hex(32).encode())
                scratch.flush()
                if key is not None:
                    # A full disk has cut it off.
                    file.unlink(missing_ok=True)
                # Another process may make it now: the first one counts.
                with suppress(FileExistsError):
                    os.link(scratch.name, file)
            key = _KEYS.read(file).strip()
        return key if key is not None and len(key) >= 32 else None
    return None


def signature_of(text: bytes) -> str | None:
    """The signature of a config's text, for :data:`SIGNATURE`; None if there is no key, and none can be made."""
    key = _key(make=True)
    return None if key is None else hmac.new(key, text, "sha256").hexdigest()


def is_trusted(folder: Path) -> bool:
    """Whether this user has started the run of a directory with just this config, or has accepted it."""
    with suppress(FinrayError):
        text = _FILES.read(folder / _CONFIG)
        if _digest(text) in accepted():
            return True
        key = _key(make=False)
        stored = _FILES.read(folder / SIGNATURE).strip()
        return key is not None and hmac.compare_digest(hmac.new(key, text, "sha256").hexdigest().encode(), stored)
    return False


def accept(file: Path) -> None:
    """The user accepts what a file of a run or a model names: for good where that can be remembered.
    Raises ConfigError: it cannot be read."""
    accept_all([digest := _digest(_FILES.read(file))])
    with suppress(*_NO_HOME):
        digests = [earlier for earlier in _remembered() if earlier != digest]
        _user_file("trusted").parent.mkdir(parents=True, exist_ok=True)
        replace_text(_user_file("trusted"), "\n".join([*digests, digest][-_MOST:]) + "\n")


def accept_all(those: Iterable[str]) -> None:
    """The user accepts, in this process, what :func:`accepted` has returned in another one, or models of the Hub by
    their names."""
    _ACCEPTED.update(those)


def accepted() -> frozenset[str]:
    """What the user has accepted: here, and before."""
    with suppress(*_NO_HOME):
        return frozenset(_ACCEPTED.union(_remembered()))
    return frozenset(_ACCEPTED)


def is_accepted(file: Path) -> bool:
    """Whether the user has accepted this file."""
    with suppress(FinrayError):
        return _digest(_FILES.read(file)) in accepted()
    return False


def _remembered() -> list[str]:
    file = _user_file("trusted")
    return _DIGESTS.text(file).split() if file.exists() else []


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def is_in_run(file: Path) -> bool:
    """Whether a config is the copy that a run directory keeps."""
    return file.name == _CONFIG and any(True for mark in _MARKS for _ in file.parent.glob(mark))


def brought(config: Config) -> list[tuple[str, str]]:
    """The code that a config names or allows, the files of this machine, and where something goes: field and value of
    each."""
    model, data, scoring, cluster = config.model, config.data, config.evaluation.scoring, config.cluster
    run, export = config.run, config.export
    named = own_code(config)
    if model.trust_remote_code:
        named.append(("model.trust_remote_code", f"true, for {model.name}"))
    if scoring is not None and scoring.run_code:
        named.append(("evaluation.scoring.run_code", "true"))
    # Variables of Python and of the linker load code; the processes of a foreign cluster are its owner's.
    named += [(f"cluster.env.{name}", value) for name, value in cluster.env.items()]
    named += [("cluster.address", cluster.address)] if cluster.address else []
    named += [("tracking.mlflow_uri", config.tracking.mlflow_uri)] if config.tracking.mlflow_uri else []
    given = config.parallel.deepspeed_config
    places = [
        ("data.source", data.source),
        ("data.eval_source", data.eval_source),
        *((f"data.mix.{number}.source", entry.source) for number, entry in enumerate(data.mix)),
        ("model.name", model.name),
        ("adapter.start_from", config.adapter.start_from),
        ("preference.reference", config.preference.reference if config.preference.names_model else None),
        ("evaluation.scoring.encoder", None if scoring is None else scoring.encoder),
    ]
    named += [(field, name) for field, name in places if name is not None and _is_place(name)]
    files = [
        ("model.chat_template", None if is_template(model.chat_template or "") else model.chat_template),
        ("parallel.deepspeed_config", given if isinstance(given, str) else None),
        ("prepare.dir", config.prepare.dir),
        ("prepare.local_dir", config.prepare.local_dir),
        ("run.local_dir", run.local_dir),
        ("run.output_dir", run.output_dir if _leads_out(config) else None),
        # Weights go to the Hub with the user's token.
        ("export.push_to_hub", export.push_to_hub),
        ("export.base_model", export.base_model),
        ("export.public", "true" if export.public else None),
    ]
    return named + [(field, name) for field, name in files if name is not None]


def _leads_out(config: Config) -> bool:
    """Whether the directory of the run is behind a URL, or not below the working directory."""
    return run_url(config) is not None or not run_path(config).is_relative_to(Path.cwd())


def _is_place(name: str) -> bool:
    """Whether a name is that of a file or directory here, and not of something on the Hub or behind a URL."""
    # Of a name that no file can have, Path.exists() raises.
    return not is_url(name) and (name.startswith(("/", ".", "~", "file://")) or os.path.exists(name))  # noqa: PTH110


def of_stranger(config: Config, where: str, *, said: Iterable[str] = ()) -> Config:
    """The same config, marked: what it names is somebody else's word, but for the fields that the user has said.

    Args:
        config: of a run that is not trusted.
        where: its file.
        said: dotted paths of fields, or of sections, beside those that were said before.
    """
    return config.with_foreign(where, config.foreign[1].union(said))


def is_word_of_stranger(config: Config, field: str) -> bool:
    """Whether a field is as the config of a run says that is not trusted, and not as the user has set it."""
    where, said = config.foreign
    return bool(where) and not _covers(said, field)


def require_trusted(config: Config, *fields: str) -> None:
    """Refuse code and files that the config of a stranger's run names, where they would take effect.

    Args:
        config: the config.
        fields: those that take effect now, or sections of them, such as ``data``; none means all.

    Raises:
        ConfigError: names each field, and how the user takes it over.
    """
    where, _ = config.foreign
    if not where:
        return
    odd = [
        (field, value)
        for field, value in brought(config)
        if is_word_of_stranger(config, field) and (not fields or _covers(fields, field))
    ]
    if odd:
        raise ConfigError(
            "finray cannot tell that you wrote the config of this run, and what it names would take effect here",
            where=where,
            repair="read it, since it may be somebody else's (or of an earlier version, or another machine): "
            "--trust-run (in Python trust_run=True) accepts all of it; a field that you set yourself is your own word",
            problems=tuple(f"{field}: {value}" for field, value in odd),
        )


def _covers(paths: Iterable[str], field: str) -> bool:
    return any(field == path or field.startswith(f"{path}.") for path in paths)
