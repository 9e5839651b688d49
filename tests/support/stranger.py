"""Nothing of the user whose machine this is: no home, no credentials, no cluster, no caches.

A test session, its processes of pytest-xdist and every command that they start have one home directory, which goes at
the end. What the user has exported for Ray, storage, hubs and trackers is taken out of the environment.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

# Set for the processes of a session, so that all have one home.
HOME = "FINRAY_TESTS_HOME"
_PREFIXES = ("RAY_", "AWS_", "AZURE_", "GOOGLE_", "GCS_", "GCLOUD_", "HF_", "HUGGING", "WANDB_", "MLFLOW_", "FINRAY_")
_PREFIXES += ("TRANSFORMERS_", "DS_", "GLOO_", "NCCL_", "TORCH_NCCL_", "SLURM_", "XDG_")
_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NETRC", "KUBECONFIG"}
_NAMES |= {"RUN_NAME", "RESULT_MODEL_ID", "OPENAI_API_KEY", "GITHUB_TOKEN", "BOTO_CONFIG", "CLOUDSDK_CONFIG"}
# Every server of a test is on this machine.
_PROXIES = {f"{scheme}_proxy" for scheme in ("http", "https", "all", "ftp", "no")}


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what says who the user is, and where their clusters, storage and trackers are."""

    def goes(name: str) -> bool:
        if name.startswith("FINRAY_TEST"):
            return False
        return name.startswith(_PREFIXES) or name in _NAMES or name.lower() in _PROXIES

    return {name: value for name, value in environ.items() if not goes(name)}


def settle(environ: MutableMapping[str, str]) -> Path | None:
    """Make the environment of a test session; the home directory, where this process made it and is to remove it."""
    plain = scrubbed(environ)
    made = None
    if HOME not in plain:
        made = Path(tempfile.mkdtemp(prefix="finray-"))
        plain[HOME] = str(made)
    home = Path(plain[HOME])
    plain |= {"HOME": str(home), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Ray adds a folder of its own. Its sockets have a path of at most 107 bytes, so every other name here is short.
    plain |= {"RAY_TMPDIR": str(home)}
    environ.clear()
    environ.update(plain)
    return made


def remove(home: Path) -> None:
    """What a session leaves: a process that a test did not end may still write there."""
    shutil.rmtree(home, ignore_errors=True)
