"""Random numbers as a function of (key, step, micro-batch), so that restarts and world sizes cannot disturb them.

Every micro-batch starts its own streams. Dropout therefore belongs to a micro-batch and not to a rank, and what has to
be saved to continue exactly is one integer.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def reseed(key: int, step: int, micro_batch: int) -> None:
    """Start the random streams of torch (CPU and GPU), NumPy and Python for one micro-batch."""
    digest = hashlib.sha256(f"{key}/{step}/{micro_batch}".encode()).digest()
    seed = int.from_bytes(digest[:8], "big")
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
