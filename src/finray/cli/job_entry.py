"""What runs on the cluster for `finray submit`: `finray train` with the config and the secrets that came with the job.

Ray writes the environment of a job into its state and its logs, so secrets do not travel in it. They come as a file
beside the config, which is deleted before anything else is done.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from finray.runtime.jobs import CODE, CONFIG, SECRETS

# Where Ray 2.60 tells the driver of a job its runtime environment.
_RAYS_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def main() -> None:
    """Run the job in the directory that Ray has unpacked."""
    file = Path(SECRETS)
    if file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        os.environ.update(found)
    code = Path(CODE).absolute()
    # Workers inherit the directory of the job, and Ray would unpack the secrets on each of their machines.
    if job_config := os.environ.get(_RAYS_JOB):
        job = json.loads(job_config)
        (job.get("runtime_env") or {}).pop("working_dir", None)
        if code.is_dir():
            # The code alone: Ray sends it to the machines of the workers, where it is the working directory too.
            job["runtime_env"] = {**(job.get("runtime_env") or {}), "working_dir": str(code)}
        os.environ[_RAYS_JOB] = json.dumps(job)
    sys.argv = ["finray", "train", str(Path(CONFIG).absolute()) if code.is_dir() else CONFIG]
    if code.is_dir():
        os.chdir(code)
    from finray.cli.start import main as run

    run()


if __name__ == "__main__":
    main()
