"""An evaluation on several replicas of an engine: the answers and losses of one, also where a replica is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from finray.config.schema import ClusterConfig
from finray.errors import ClusterError, ModelError
from finray.evaluation.artifacts import artifact_of
from finray.evaluation.engines import Answer, Continuation, Sampling, make_engine
from finray.runtime import spread
from finray.runtime.spread import SpreadEngine
from tests.support import runs, tiny

PROMPTS = [
    torch.randint(3, 380, (3 + at % 7,), generator=torch.Generator().manual_seed(at)).tolist() for at in range(9)
]
ROWS = [Continuation(prompt, [7, 9 + place]) for place, prompt in enumerate(PROMPTS)]
SAMPLED = Sampling(6, temperature=1.3, seed=3)


def test_replicas_say_what_one_engine_says(
    tiny_model_dir: Path, ray_cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import RayActorError

    def pids() -> list[int]:
        """Of the replicas that wait for rows and are alive."""
        found = []
        for replica in replicas._free:
            with suppress(RayActorError):
                found.append(replicas._ray.get(replica.about.remote()).pid)
        return found

    artifact, notes, numbers = artifact_of(tiny_model_dir), list[str](), [row + 5 for row in range(9)]
    alone = make_engine("transformers", artifact, dtype=torch.float32)
    greedy = {one.row: one for one in alone.generate(PROMPTS, Sampling(6))}
    expected = {one.row: one for one in alone.generate(PROMPTS, SAMPLED, rows=numbers)}
    assert [one.text for one in expected.values()] != [one.text for one in greedy.values()]
    # Each is given two rows or more at a time.
    options = {"replicas": 2, "cluster": ClusterConfig(), "batch_size": 2, "dtype": torch.float32}
    replicas = SpreadEngine("transformers", artifact, **options, notify=notes.append)
    try:
        assert (replicas.version, replicas.max_length) == (alone.version, alone.max_length)
        assert {one.row: one for one in replicas.generate(PROMPTS, Sampling(6))} == greedy
        told: list[tuple[int, int]] = []
        found = replicas.generate(PROMPTS, SAMPLED, rows=numbers, on_token=lambda *one: told.append(one))
        assert {one.row: one for one in found} == expected
        assert [token for row, token in told if row == 7] == list(expected[7].tokens)
        right = {one.row: one for one in alone.log_likelihood(ROWS)}
        for one in replicas.log_likelihood(ROWS):
            assert one.logprobs == pytest.approx(right.pop(one.row).logprobs, abs=1e-5)
        assert not right

        # One is killed at its rows: what it had said counts, others say the rest, and another one takes its place.
        before, said = pids(), dict[int, Answer]()
        for answer in replicas.generate(PROMPTS, SAMPLED, rows=numbers):
            if not said:
                os.kill(before[0], signal.SIGKILL)
            assert answer.row not in said
            said[answer.row] = answer
        assert said == expected
        # Killed while it has nothing to do, it is missed as soon as it is asked.
        os.kill(pids()[0], signal.SIGKILL)
        assert {one.row: one for one in replicas.generate(PROMPTS, SAMPLED, rows=numbers)} == expected
        assert "is being replaced" in notes[-1]

        # Replicas that are lost again and again end it.
        while replicas._starting:
            list(replicas.generate(PROMPTS, Sampling(2)))
        monkeypatch.setattr(spread, "TRIES", 1)
        for pid in pids():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match="were lost and no row was finished in between"):
            list(replicas.generate(PROMPTS, Sampling(2)))
        monkeypatch.undo()

        # Where there is no room for another one, that is said instead of waited for.
        monkeypatch.setattr(spread, "_ROOM_S", 0.5)
        monkeypatch.setattr(
            replicas, "_make", replicas._ray.remote(resources={"nowhere": 1})(spread._EngineReplica).remote
        )
        made = replicas._make
        monkeypatch.setattr(replicas, "_make", lambda: made("transformers", artifact, {}, [], 1, {}))
        replicas._start()
        with pytest.raises(ClusterError, match="the cluster has had no room for another one"):
            list(replicas.generate(PROMPTS, Sampling(2)))
    finally:
        replicas.close()


def test_what_no_replica_can_load_is_its_error(
    tiny_model_dir: Path, tmp_path: Path, ray_cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from finray.runtime import gcs

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((tiny_model_dir / name).read_text())
    # Others have a CPU, and for a moment Ray counts all of them as taken, and then a part, as after the end of other
    # replicas: each gets one, and not the two that it would have on an idle cluster.
    now, late = gcs.available_resources, iter([{}, {}, {"node": {"CPU": 4.0}}])
    monkeypatch.setattr(gcs, "available_resources", lambda address: next(late, now(address)))
    monkeypatch.setattr(spread, "_ROOM_S", 5)
    taken = ray.util.placement_group([{"CPU": 1}])
    assert taken.wait(60)
    with pytest.raises(ModelError):
        SpreadEngine("transformers", artifact_of(tmp_path), replicas=2, cluster=ClusterConfig())
    ray.util.remove_placement_group(taken)


def test_a_machine_that_does_not_see_the_model_is_named(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a Ray: what an actor on another machine would do."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    artifact = artifact_of(tiny_model_dir)
    there = spread._EngineReplica("transformers", artifact, {}, [tiny_model_dir], 1, {})
    assert there.about().name == "transformers"
    elsewhere = spread._EngineReplica("transformers", artifact, {}, [tiny_model_dir, tmp_path / "base"], 1, {})
    with pytest.raises(ModelError, match=f"{socket.gethostname()} does not see the model") as refused:
        elsewhere.about()
    assert str(refused.value.where) == str(tmp_path / "base")


def test_the_command_spreads_rows_and_goes_on_with_what_is_kept(
    tiny_model_dir: Path, tmp_path: Path, ray_cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In bf16, other batches may give other last bits.
    monkeypatch.setattr("finray.evaluation.artifacts.cpu_has_bf16", lambda: False)
    rows = [{"prompt": f"what is {word}", "completion": word} for word in tiny.WORDS[:6]]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = []
    for name, replicas in (("one", "1"), ("two", "2")):
        given = [tiny_model_dir, "--file", file, "--max-new-tokens", "4", "--engine", "transformers"]
        code, out, err = runs.finray("evaluate", *given, "--replicas", replicas, "--output", tmp_path / name)
        assert code == 0, out + err
        told.append([json.loads(line) for line in (tmp_path / name / "predictions.jsonl").read_text().splitlines()])
    assert [one["answers"] for one in told[0]] == [one["answers"] for one in told[1]]
    assert [one["where"] for one in told[0]] == [one["where"] for one in told[1]]
    metrics = json.loads((tmp_path / "two" / "metrics.json").read_text())
    assert metrics["made_by"]["engine"][0]["name"] == "transformers, 2 replicas on Ray"

    # As a kill leaves it: the first lines. More replicas than there is room for are asked for, and then one.
    (kept,) = (tmp_path / "two").glob("answers-*.jsonl")
    lines = kept.read_bytes().splitlines(keepends=True)
    kept.write_bytes(b"".join(lines[:4]) + lines[4][:-5])
    code, out, err = runs.finray("evaluate", *given, "--replicas", "5", "--output", tmp_path / "two")
    assert code == 2
    assert "5 replicas need a CPU each, and the cluster has 4 CPUs on 1 machine" in out + err
    assert "ask for 4 or fewer" in out + err
    code, out, err = runs.finray("evaluate", *given, "--output", tmp_path / "two")
    assert code == 0, out + err
    after = kept.read_bytes().splitlines(keepends=True)
    assert after[:4] == lines[:4]
    assert sorted(after[5:]) == sorted(lines[4:])
    assert json.loads(after[4])["made_by"] == {
        "name": "transformers",
        "version": metrics["made_by"]["engine"][0]["version"],
    }
