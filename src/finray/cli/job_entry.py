"""What runs on the cluster for `finray submit`: `finray train` with the config and the secrets that came with the job.

Ray writes the environment of a job into its state and its logs, so secrets do not travel in it. They come as a file
beside the config, which is deleted before anything else is done.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from finray.runtime.jobs import CONFIG, SECRETS


def main() -> None:
    """Run the job in the directory that Ray has unpacked."""
    file = Path(SECRETS)
    if file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        os.environ.update(found)
    sys.argv = ["finray", "train", CONFIG]
    from finray.cli.start import main as run

    run()


if __name__ == "__main__":
    main()
