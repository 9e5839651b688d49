"""Puts small errors into finray, one at a time, and sees whether a test fails: `make mutants`.

A server imports what takes long, and forks. Each child has a copy of `src/` with one error in it, and runs the tests
that reach the line until one fails. Which those are is known from one traced run of every test file, kept in
`.mutants/map/`. Results are appended to `.mutants/results/`: a run that was stopped continues.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tools.mutants import child, reach
from tools.mutants.operators import Mutant, all_candidates, is_python

HERE = Path(__file__).parent
ROOMS = ("data", "models", "training", "parallel", "checkpoint", "evaluation")
PRELOADED = ("torch", "transformers.models.llama.modeling_llama", "peft", "datasets", "pydantic")


@dataclass(frozen=True, slots=True)
class Job:
    """One child: what it changes, what it runs, and who is told."""

    name: str
    files: list[str]
    wanted: dict[str, float] | None
    change: tuple[str, bytes] | None
    limit: float
    tell: Callable[[dict[str, Any], float], None]


def run_all(jobs: Iterator[Job], *, processes: int, trace: bool = False) -> None:
    """Run the jobs, several at a time."""
    copies = [child.Copy() for _ in range(processes)]
    running: dict[int, tuple[Job, child.Copy, float]] = {}
    jobs = iter(jobs)
    try:
        while True:
            while copies and (job := next(jobs, None)) is not None:
                copy = copies.pop()
                copy.restore()
                if job.change is not None:
                    copy.change(*job.change)
                running[child.fork(copy, job.files, job.wanted, trace=trace)] = (job, copy, time.monotonic())
            if not running:
                return
            time.sleep(0.1)
            for pid, (job, copy, start) in list(running.items()):
                ended, _ = os.waitpid(pid, os.WNOHANG)
                if not ended and time.monotonic() - start < job.limit:
                    continue
                child.sweep(copy, pid)
                if not ended:
                    os.waitpid(pid, 0)
                del running[pid]
                found = child.outcome(copy)
                job.tell(found if ended else {**found, "code": -1}, time.monotonic() - start)
                copies.append(copy)
    finally:
        for pid, (_, copy, _) in running.items():
            child.sweep(copy, pid)
            copies.append(copy)
        for copy in copies:
            copy.remove()


def preload() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in PRELOADED:
        __import__(name)
    assert "finray" not in sys.modules


def draw_map(only: list[str], processes: int) -> None:
    """Trace the test files of which nothing is known, or that have changed."""

    def job(file: str) -> Job:
        def tell(found: dict[str, Any], seconds: float) -> None:
            kept = f"{reach.keep(file, found)} tests" if found["code"] in (0, 1) else "NOTHING"
            print(f"{seconds:6.1f} s  {file}: {kept}", *found["bad"].items(), flush=True)

        return Job(file, [file], None, None, 1500, tell)

    files = [file for file in reach.test_files() if file.startswith(tuple(only) or "tests")]
    run_all((job(file) for file in files if not reach.is_known(file)), processes=processes, trace=True)


def key_of(mutant: Mutant) -> dict[str, str]:
    """What a mutant is known by when lines have moved."""
    return {"file": mutant.file, "source": mutant.source, "change": f"{mutant.old} -> {mutant.text}"}


def judged() -> list[dict[str, Any]]:
    """What a person has judged harmless, each with the reason; without a `change` it is any of the line."""
    return list(tomllib.loads((HERE / "harmless.toml").read_text(encoding="utf-8")).get("harmless", []))


def is_harmless(result: dict[str, Any]) -> bool:
    def is_of(one: dict[str, Any]) -> bool:
        changes = one.get("change", result["change"])
        known = result["change"] in ([changes] if isinstance(changes, str) else changes)
        return known and all(result[key] == one[key] for key in ("file", "source"))

    return any(map(is_of, judged()))


def mutant_jobs(chosen: list[Mutant], texts: dict[str, str], cap: float, write: Callable[..., None]) -> Iterator[Job]:
    known = reach.Reach(texts)

    def job(mutant: Mutant, wanted: dict[str, float], of: int) -> Job:
        def tell(found: dict[str, Any], seconds: float) -> None:
            by = next(iter(found["bad"].items()), None)
            result = {0: "survived", 1: "killed", 2: "killed", -1: "timeout"}.get(found["code"], "error")
            write(mutant, result, seconds, run=len(wanted), of=of, by=by)

        files = list(dict.fromkeys(name.partition("::")[0] for name in wanted))
        changed = mutant.applied(texts[mutant.file].encode())
        return Job(mutant.file, files, wanted, (mutant.file, changed), 60 + 5 * sum(wanted.values()), tell)

    for mutant in chosen:
        tests = known.of(mutant)
        wanted: dict[str, float] = {}
        for name, seconds in tests.items():
            if not wanted or sum(wanted.values()) + seconds <= cap:
                wanted[name] = seconds
        if wanted:
            yield job(mutant, wanted, len(tests))
        else:
            write(mutant, "untested", 0.0, run=0, of=0, by=None)


def sample(arguments: argparse.Namespace) -> None:
    texts = reach.sources()
    rooms = tuple(arguments.rooms.split(","))
    everything = list(all_candidates(texts, rooms))
    drawn = random.Random(arguments.seed).sample(everything, len(everything))
    chosen = list(islice((one for one in drawn if is_python(one, texts[one.file])), arguments.count))
    path = reach.STATE / "results" / f"{arguments.seed}-{arguments.count}-{arguments.rooms.replace('/', '.')}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if arguments.again:
        results = [one for one in results if one["outcome"] in ("killed", "timeout")]
        path.write_text("".join(f"{json.dumps(one)}\n" for one in results))
    done = [(one["file"], one["source"], one["change"], one["nth"]) for one in results]
    count: Counter[tuple[str, ...]] = Counter()
    identity = {}
    for mutant in everything:
        identity[mutant] = count[tuple(key_of(mutant).values())]
        count[tuple(key_of(mutant).values())] += 1

    def write(mutant: Mutant, outcome: str, seconds: float, **more: Any) -> None:
        result = {**key_of(mutant), "nth": identity[mutant], "line": mutant.line, "kind": mutant.kind}
        result |= {"outcome": outcome, "seconds": round(seconds, 1), **more}
        results.append(result)
        with path.open("a") as file:
            file.write(f"{json.dumps(result)}\n")
        print(f"{len(results)}/{len(chosen)} {outcome:9} {seconds:5.1f} s  {mutant.file}:{mutant.line}", flush=True)

    left = [mutant for mutant in chosen if (*key_of(mutant).values(), identity[mutant]) not in done]
    run_all(mutant_jobs(left, texts, arguments.cap, write), processes=arguments.processes)
    print(summary(results, arguments))


def summary(results: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """The result as `tools/mutants/README.md` has it."""
    lines = [f"\nSeed {arguments.seed}, {len(results)} mutants, at most {arguments.cap:.0f} s of tests each.", ""]
    lines += ["| room | mutants | killed | by time | survived | harmless |", "|---|---|---|---|---|---|"]
    rooms = sorted({one["file"].partition("/")[0] for one in results})
    for room in [*rooms, "all"]:
        own = [one for one in results if room in ("all", one["file"].partition("/")[0])]
        count = Counter(one["outcome"] for one in own)
        alive = [one for one in own if one["outcome"] not in ("killed", "timeout")]
        harmless = sum(is_harmless(one) for one in alive)
        lines.append(f"| {room} | {len(own)} | {count['killed']} | {count['timeout']} | {len(alive)} | {harmless} |")
    lines += ["", "Survivors:", ""]
    for one in sorted(results, key=lambda one: (one["file"], one["line"])):
        if one["outcome"] not in ("killed", "timeout"):
            note = "harmless" if is_harmless(one) else f"{one['outcome']}, {one['run']} of {one['of']} tests"
            lines.append(
                f"- `{one['file']}:{one['line']}` ({one['kind']}, {note}): `{one['source']}`: `{one['change']}`"
            )
    return "\n".join(lines)


def known_errors() -> list[dict[str, Any]]:
    """The errors that were once put in and not noticed: `file`, `find`, `replace`, and the `tests` that notice now."""
    files = sorted(HERE.glob("known*.toml"))
    return [one for file in files for one in tomllib.loads(file.read_text(encoding="utf-8")).get("error", [])]


def stale(error: dict[str, Any]) -> str | None:
    """Why a known error cannot be put in again, if the code or a test that it names has changed since."""
    text = source_of(error)
    if text.count(error["find"]) != 1:
        return f"`{error['find']}` stands {text.count(error['find'])} times in {error['file']}"
    for name in error["tests"]:
        file, _, test = name.partition("[")[0].partition("::")
        if not (reach.ROOT / file).exists():
            return f"there is no {file}"
        tree = ast.parse((reach.ROOT / file).read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        if test and not set(test.split("::")) <= names:
            return f"there is no {name}"
    return None


def source_of(error: dict[str, Any]) -> str:
    """The text of the file of a known error; empty where it is gone."""
    path = reach.ROOT / "src" / "finray" / error["file"].removeprefix("src/finray/")
    return path.read_text(encoding="utf-8") if path.exists() else ""


def stale_entries() -> list[str]:
    """The entries of the lists that fit the code no longer. They are no errors: a person updates or removes them."""
    texts = reach.sources()
    found = [f"known error {error['name']!r}: {why}" for error in known_errors() if (why := stale(error))]
    return found + [
        f"harmless: `{one['source']}` is not in {one['file']}"
        for one in judged()
        if one["source"] not in texts.get(one["file"], "")
    ]


def put_in_again(processes: int, only: str) -> int:
    """Each known error, against the tests that are named; returns how many were not noticed."""
    missed: list[str] = []

    def job(error: dict[str, Any]) -> Job:
        def tell(found: dict[str, Any], seconds: float) -> None:
            noticed = found["code"] in (1, 2, -1)
            if not noticed:
                missed.append(error["name"])
            print(f"{'noticed' if noticed else 'NOT NOTICED':12} {seconds:5.1f} s  {error['name']}", flush=True)

        file = error["file"].removeprefix("src/finray/")
        changed = source_of(error).replace(error["find"], error["replace"]).encode()
        files = list(dict.fromkeys(name.partition("::")[0] for name in error["tests"]))
        return Job(error["name"], files, dict.fromkeys(error["tests"], 30.0), (file, changed), 600, tell)

    errors = [error for error in known_errors() if only in error["name"] and not stale(error)]
    run_all((job(error) for error in errors), processes=processes)
    print(f"{len(errors) - len(missed)} of {len(errors)} known errors were noticed")
    return len(missed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("command", choices=("map", "sample", "known", "stale"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--rooms", default=",".join(ROOMS), help="folders of src/finray, with commas")
    parser.add_argument("--cap", type=float, default=180.0, help="seconds of tests for a mutant")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--only", default="", help="test files that begin so, with commas (map); a part of a name (known)"
    )
    parser.add_argument("--again", action="store_true", help="run the survivors of this sample once more")
    arguments = parser.parse_args()
    if arguments.command == "stale":
        print(*stale_entries(), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    preload()
    with suppress(KeyboardInterrupt):
        if arguments.command in ("known", "sample"):
            print(*(f"STALE {entry}" for entry in stale_entries()), sep="\n")
        if arguments.command == "known":
            return min(1, put_in_again(arguments.processes, arguments.only))
        draw_map([one for one in arguments.only.split(",") if one], arguments.processes)
        if arguments.command == "sample":
            sample(arguments)
        return 0
    return 130


if __name__ == "__main__":
    sys.exit(main())
