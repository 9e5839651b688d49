"""Environment variables: the user's own wins, and a default is set only where nothing is."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

# What finray has set in this process; not the user's.
_OURS: dict[str, str] = {}
# Secrets that workers need. They are handed over as arguments: Ray writes the environment of its workers into logs.
SECRETS = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"),
    *("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    # Where the user's services are, beside the keys to them.
    *("WANDB_BASE_URL", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY"),
    *("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"),
)
# Turns of a loop in which a thread of torch's OpenMP waits for the others before it sleeps, some ten microseconds. Its
# own 300,000 keep a core from the very thread that is waited for, where other programs use the cores too.
SPINS = 2000


def set_default(name: str, value: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set a variable of this process and its children, unless it is set."""
    if name not in environ:
        environ[name] = _OURS[name] = value


def unset_default(*names: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Unset variables that :func:`set_default` has set; the user's own values stay."""
    for name in names:
        if name in _OURS and environ.get(name) == _OURS[name]:
            del environ[name], _OURS[name]


def with_defaults(
    given: Mapping[str, str], defaults: Mapping[tuple[str, ...], str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables of workers: those of the config, then those of the user's environment, then the defaults.

    Args:
        given: those of the config.
        defaults: by name; names in one key mean the same, and the program that reads them prefers one of them.
        environ: of this process.
    """
    variables = dict(given)
    for names, default in defaults.items():
        users = {name: environ[name] for name in names if name in environ and _OURS.get(name) != environ[name]}
        chosen = {name: given[name] for name in names if name in given} or users or {names[0]: default}
        # Workers may inherit the other name.
        (value, *_) = chosen.values()
        variables |= {name: chosen.get(name, value) for name in names if name in chosen or name in environ}
    return variables


def spin_limit(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that have threads of torch's OpenMP sleep soon, unless the user has said how they wait."""
    return {} if "OMP_WAIT_POLICY" in environ else {"GOMP_SPINCOUNT": str(SPINS)}


def limit_spinning() -> None:
    """Have the threads of this process sleep soon; torch reads that when it is imported."""
    for name, value in spin_limit().items():
        set_default(name, value)


def secrets_of(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The user's secrets that workers receive."""
    return {name: environ[name] for name in SECRETS if environ.get(name)}


def accept(secrets: Mapping[str, str]) -> None:
    """In a worker: set the secrets that it received, unless the node has its own."""
    for name, value in secrets.items():
        os.environ.setdefault(name, value)
    trim_secrets()


def trim_secrets(environ: MutableMapping[str, str] = os.environ) -> None:
    """Take white space off the ends of secrets: a mounted one often ends in a newline, which MLflow and W&B refuse."""
    for name in SECRETS:
        if name in environ and environ[name] != environ[name].strip():
            environ[name] = environ[name].strip()
