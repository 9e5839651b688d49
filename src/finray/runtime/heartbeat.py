"""The heartbeats with which a rank or an evaluation tells the driver where it is."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass

from finray.records import Beat
from finray.runtime.progress import Sender
from finray.training.pulse import Pulse

# The shortest interval between a rank's heartbeats where a long hang timeout allows it, and what each rank adds: the
# driver gets no more messages from many ranks than from eight.
_BEAT_S, _BEAT_RANK_S = 10.0, 1.25
# Their pause is a share of `cluster.hang_seconds`; of this where it is null.
_HANG_S = 300.0


@dataclass
class Heart:
    """What the heartbeats of this rank tell."""

    pulse: Pulse


def beat(sender: Sender, attempt: str, rank: int, pulse: Pulse, *, hang_s: float | None, world_size: int = 1) -> Heart:
    """Start a thread that sends heartbeats to the driver; SIGUSR1 writes the stacks of all threads."""
    import faulthandler

    import ray

    # Also where no hang is looked for: the driver learns from heartbeats where the ranks are, and which one is slow.
    pause_s = beat_pause(_HANG_S if hang_s is None else hang_s, world_size)
    heart = Heart(pulse)
    host, pid, node = socket.gethostname(), os.getpid(), ray.get_runtime_context().get_node_id()
    with suppress(ValueError, OSError, RuntimeError):
        faulthandler.register(signal.SIGUSR1, all_threads=True)

    def send_beats() -> None:
        while not sender.is_closed:
            now = heart.pulse
            sender.put(
                Beat(
                    attempt,
                    rank,
                    host,
                    pid,
                    node,
                    step=now.step,
                    phase=now.phase,
                    steps=now.steps,
                    work_s=now.work_s,
                    longest_s=now.longest_s,
                    part=now.part,
                    share=now.share,
                )
            )
            sender.wait_closed(pause_s)

    threading.Thread(target=send_beats, name="finray-beat", daemon=True).start()
    return heart


def beat_pause(hang_s: float, world_size: int) -> float:
    """Seconds between a rank's heartbeats."""
    return min(hang_s / 5, max(_BEAT_S, _BEAT_RANK_S * world_size))
