"""The checkpoint package: the manifest, writing and committing, finding and verifying, retention."""

from finray.checkpoint.store import Checkpoint, CheckpointStore, directory_name

__all__ = ["Checkpoint", "CheckpointStore", "directory_name"]
