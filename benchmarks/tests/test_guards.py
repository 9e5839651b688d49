"""What keeps a benchmark honest: one count of tokens, equal losses or no result, medians of paired ratios."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import tiny

Import = Callable[[str], Any]


def trained(**changed: Any) -> dict[str, Any]:
    """A result of two steps over rows of 5, 7 and 11 tokens, of which the second is timed."""
    return {
        "rows": [[0, 1], [2]],
        "own_tokens": [12, 11],
        "padded_tokens": [14, 11],
        "targets": [3, 4],
        "losses": [2.0, 1.0],
        "norms": [1.0, 1.0],
        "marks": [10.0, 12.0],
        "cpu_marks": [],
        "trainable_parameters": 8,
        **changed,
    }


LENGTHS = [5, 7, 11]


def test_tokens_are_counted_from_the_rows_seen(benchmark_module: Import) -> None:
    cpu = benchmark_module("cpu")
    found = cpu.figures(SimpleNamespace(warmup=1), trained(), LENGTHS)
    assert (found["tokens"], found["tokens_per_s"]) == (11, 5.5)


@pytest.mark.parametrize("own", [[24, 22], [12, 10]])
def test_another_count_of_tokens_than_the_rows_have_is_an_error(benchmark_module: Import, own: list[int]) -> None:
    cpu, case = benchmark_module("cpu"), benchmark_module("case")
    with pytest.raises(case.BenchmarkError, match="own count"):
        cpu.figures(SimpleNamespace(warmup=1), trained(own_tokens=own), LENGTHS)


def test_rows_are_counted_as_the_template_renders_them(benchmark_module: Import, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    rows = [
        {"messages": [{"role": "user", "content": "river"}, {"role": "assistant", "content": "deep " * words}]}
        for words in (1, 9)
    ]
    tiny.save_model("llama", tmp_path, tiny.train_tokenizer())
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    lengths = [len(tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]) for row in rows]
    count = benchmark_module("rows").count_tokens
    assert count(rows, tmp_path, max_length=1000) == lengths
    assert count(rows, tmp_path, max_length=lengths[0]) == [lengths[0]] * 2


@pytest.mark.parametrize(
    "theirs",
    [{"losses": [2.1, 1.0]}, {"losses": [2.0, 1.1]}, {"norms": [1.1, 1.0]}, {"targets": [3, 5]}],
    ids=["first loss", "mean loss", "gradient", "targets"],
)
def test_losses_that_differ_are_an_error(benchmark_module: Import, theirs: dict[str, Any]) -> None:
    cpu, case = benchmark_module("cpu"), benchmark_module("case")
    for block in (cpu.IN_FP32, cpu.AS_TIMED):
        cpu.equal_losses(block, {"finray": [trained()], "peer": [trained()]})
        with pytest.raises(case.BenchmarkError, match="peer did not do the same"):
            cpu.equal_losses(block, {"finray": [trained()], "peer": [trained(**theirs)]})


def make_case(case: Any, run: Any, **fields: Any) -> Any:
    contenders = {"ours": lambda bench, pair: run("ours", pair), "theirs": lambda bench, pair: run("theirs", pair)}
    return case.Case(
        group="cpu",
        name="made",
        title="Made",
        what="Nothing.",
        blocks=case.alone(contenders),
        measures=[case.Measure("seconds", "seconds", 1)],
        ratios=case.over_others,
        **fields,
    )


SECONDS = {"ours": [1.0, 8.0, 3.0], "theirs": [2.0, 2.0, 3.0]}


def test_contenders_take_turns_and_ratios_are_medians_of_pairs(benchmark_module: Import) -> None:
    case = benchmark_module("case")
    order: list[str] = []

    def run(name: str, pair: int) -> dict[str, float]:
        order.append(name)
        return {"seconds": SECONDS[name][pair]}

    made = make_case(case, run, aims=[case.Aim("ours ÷ theirs", case.quotient("ours", "theirs", "seconds"), least=2)])
    blocks = made.measure(SimpleNamespace(pairs=3))
    assert order == ["ours", "theirs"] * 3
    # The pairs' ratios are 0.5, 4 and 1; the medians are 3 and 2.
    assert made.figures(blocks) == [["ours ÷ theirs", "≥ 2.00×", "1.00×", "missed"]]
    assert "| ours | 3.0 (1.0–8.0) |" in made.show(blocks)
    assert "| ours ÷ theirs | 1.00× (0.50–4.00) |" in made.show(blocks)


def test_a_case_whose_check_fails_writes_nothing(
    benchmark_module: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, run = benchmark_module("case"), benchmark_module("run")

    def refuse(block: str, runs: Any) -> None:
        raise case.BenchmarkError("not the same work")

    made = make_case(case, lambda name, pair: {"seconds": 1.0}, check=refuse)
    monkeypatch.setattr(run, "cases", lambda group: [made])
    results = tmp_path / "RESULTS.md"
    with pytest.raises(case.BenchmarkError, match="not the same work"):
        run.main(["cpu", "--pairs", "1", "--results", str(results)])
    assert not results.exists()


def test_results_begin_with_one_table_whose_lines_and_sections_are_replaced(
    benchmark_module: Import, tmp_path: Path
) -> None:
    write = benchmark_module("report").write
    path = tmp_path / "RESULTS.md"
    write(path, "Group", "One", "old text", [["speed", "≥ 2×", "1×", "missed"]], "2026-01-01")
    write(path, "Group", "Two", "two", [["memory", "", "3 GiB", ""]], "2026-01-02")
    write(path, "Other", "Three", "three", [], "2026-01-03")
    write(path, "Group", "One", "new text", [["speed", "≥ 2×", "3×", "met"]], "2026-01-04")
    text = path.read_text(encoding="utf-8")
    assert "old text" not in text
    assert text.index("| speed | ≥ 2× | 3× | met | 2026-01-04 |") < text.index("| memory |") < text.index("## Group")
    assert text.index("### One\n\nnew text") < text.index("### Two\n\ntwo") < text.index("## Other\n\n### Three")
    assert text.count("| speed |") == 1


def test_a_run_that_fails_says_how_it_ended(benchmark_module: Import) -> None:
    processes, case = benchmark_module("processes"), benchmark_module("case")
    env = processes.environment(threads=1)
    assert processes.run(["python3", "-c", "print('{\"a\": 1}')"], env=env).result == {"a": 1}
    with pytest.raises(case.BenchmarkError, match="ended with 3"):
        processes.run(["python3", "-c", "import sys; sys.exit(3)"], env=env)


def test_memory_of_a_process_tree_is_that_of_all_its_processes(
    benchmark_module: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, watches = benchmark_module("processes"), list[Any]()

    def watched(running: Any, watch: Callable[[Any], Any] = processes._MemoryWatch) -> Any:
        watches.append(watch(running))
        return watches[-1]

    monkeypatch.setattr(processes, "_MemoryWatch", watched)
    code = "import time; x = bytearray(80 << 20); time.sleep(3600)"
    parent = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {json.dumps(code)}]).returncode)"
    env = processes.environment(threads=1)
    # However late it is looked at.
    ran = processes.run(["python3", "-c", parent], env=env, watch=True, until=lambda: min(watches[0]._peaks) > 80 << 20)
    assert ran.resident > 80 << 20
    assert ran.proportional > 80 << 20


def test_a_step_of_the_gpu_benchmark_is_one_of_finrays(
    benchmark_module: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The script sets it for itself.
    monkeypatch.setenv("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "0"))
    gpu = benchmark_module("gpu")
    rows = gpu.draw_rows(40, 100, 16)
    assert len(rows) >= 3
    step = gpu.step_data(rows, [(0, 1), (2,)])
    batches = [batch for _, batch in step.micro_batches]
    assert [batch.lengths for batch in batches] == [tuple(len(rows[n][0]) for n in some) for some in ((0, 1), (2,))]
    assert step.weight == step.supervised == sum(len(batch.targets_K) for batch in batches)
    assert (step.tokens, step.samples, step.items) == (sum(batch.tokens for batch in batches), (0, 1, 2), 2)
