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
        variables = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        os.environ.update(variables)
    config, code = Path(CONFIG).absolute(), Path(CODE).absolute()
    # Workers inherit the directory of the job, and Ray would unpack the secrets on each of their machines. They get the
    # code alone: it is the working directory of the driver, and by Ray on the machines of the workers.
    working_dir = {}
    if code.is_dir():
        os.chdir(code)
        working_dir = {"working_dir": str(code)}
    if job_config := os.environ.get(_RAYS_JOB):
        job = json.loads(job_config)
        inherited = {name: entry for name, entry in (job.get("runtime_env") or {}).items() if name != "working_dir"}
        os.environ[_RAYS_JOB] = json.dumps({**job, "runtime_env": {**inherited, **working_dir}})
    sys.argv = ["finray", "train", str(config)]
    from finray.cli.start import main as run

    run()


if __name__ == "__main__":
    main()
