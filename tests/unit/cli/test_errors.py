"""Whatever a command raises is one message with a repair; what comes from outside is text on the screen."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa
import pydantic
import pytest
import torch
import yaml
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError

from finray import results
from finray.cli import show
from finray.config.schema import ModelConfig
from finray.errors import FinrayError, ModelError, about_model, explained
from finray.pretrained.tokenizers import check_exists
from tests.support import runs


def _raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def _from_transformers() -> Exception:
    """An error of Python's that a library raises over what it was given."""
    from transformers import PreTrainedConfig

    try:
        PreTrainedConfig.from_dict(None)  # type: ignore[arg-type]
    except Exception as error:
        return error
    raise AssertionError


def _noted() -> Exception:
    """A configuration whose values do not go together."""
    from transformers import AutoConfig

    with pytest.raises(Exception) as caught, about_model("m/x"):  # noqa: PT011
        AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=5)
    return caught.value


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/data/x"), ("/data/x: permission denied", "permission")),
        (
            OSError(errno.ENOSPC, "No space left on device", "/data/x"),
            ("/data/x: no space left", "free some disk space"),
        ),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), ("file name too long", "shorter")),
        (OSError("Couldn't reach the server"), ("Couldn't reach the server",)),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), ("not text in UTF-8", "save it")),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), ("not valid Unicode", "look for it")),
        (json.JSONDecodeError("Expecting value", "", 0), ("not JSON",)),
        (yaml.YAMLError("mapping values are not allowed here"), ("not YAML",)),
        (SafetensorError("Error while deserializing header"), ("safetensors", "download the model again")),
        (MemoryError(), ("out of memory", "a number that is too large")),
        (RecursionError("maximum recursion depth exceeded"), ("nested too deeply",)),
        (jinja2.TemplateSyntaxError("unexpected '}'", 1), ("the chat template fails", "fix it")),
        (pa.ArrowInvalid("Not a Parquet file"), ("Arrow", "Not a Parquet file")),
        (torch.OutOfMemoryError("CUDA out of memory"), ("the GPU is out of memory", "finray plan")),
        (FinrayError("mine", where="here", repair="so"), ("here: mine", "repair: so")),
        # Nothing was seen of its files; the cause stands in the second line, and what it is about was noted.
        (_from_transformers(), ("transformers failed", "FINRAY_VERBOSE")),
        (_noted(), ("model.name=m/x: ", "'validate_architecture': ValueError: The hidden size", "FINRAY_VERBOSE")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_that_input_causes_is_one_message_with_a_repair(
    error: Exception, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "load", _raising(error))
    code, out, err = runs.finray("config", "show", "run.yaml")
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    for part in (*parts, "  repair: "):
        assert part in err


def test_a_section_that_a_command_makes_is_the_users_and_any_other_model_is_not() -> None:
    class Answer(pydantic.BaseModel):
        count: int

    found = []
    for kind, given in ((ModelConfig, {"name": "m\0"}), (Answer, {"count": "x"})):
        with pytest.raises(pydantic.ValidationError) as caught:
            kind.model_validate(given)
        found.append(explained(caught.value))
    assert found[0] is not None
    assert (found[0].where, found[0].repair) == ("name", "correct this value")
    assert found[1] is None


def test_a_defect_has_a_reference_and_a_file_with_the_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-mine")
    monkeypatch.setattr(show, "load", _raising(TypeError("a-secret-of-mine is not a number")))
    code, _, err = runs.finray("config", "show", "run.yaml")
    assert code == 1
    assert "Traceback" not in err
    reference = re.search(r"this is a bug in finray \(reference ([0-9a-f]{8})\): TypeError", err)
    assert reference is not None
    text = (tmp_path / "finray" / "defects" / f"finray-{reference[1]}.txt").read_text()
    assert "Traceback" in text
    assert "show_config" in text
    assert "a-secret-of-mine" not in err + text
    # The same defect is told by the same reference.
    monkeypatch.setattr(show, "load", _raising(TypeError("another text")))
    assert f"reference {reference[1]}" in runs.finray("config", "show", "run.yaml")[2]


def test_verbose_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("FINRAY_VERBOSE", "1")
    monkeypatch.setattr(show, "load", _raising(MemoryError()))
    assert "Traceback" in runs.finray("config", "show", "run.yaml")[2]


@pytest.mark.parametrize("text", ["/data/[exp1]/runs", "[/x]", "[bold]", "a:smile:b", "\\[x]"])
def test_brackets_and_colons_are_shown_as_they_are(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    console = show.console()
    console.print(f"note {text}", highlight=False)
    table = Table(title=f"title {text}")
    table.add_column(f"column {text}")
    table.add_row(f"cell {text}")
    console.print(table)
    shown = capsys.readouterr().out
    for place in ("note", "title", "column", "cell"):
        assert f"{place} {text}" in shown


def test_what_would_control_the_terminal_is_shown_by_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    show.console().print("a\x1b[31mb\ud800c\rd\n", highlight=False)
    assert capsys.readouterr().out == "a<U+001B>[31mb<U+D800>c<U+000D>d\n\n"


def test_a_secret_in_an_error_is_masked(tmp_path: Path) -> None:
    token = "hf_" + "a1" * 17
    code, out, err = runs.finray("plan", tmp_path / f"{token}.yaml")
    assert (code, token in out + err) == (2, False)
    assert "***" in err


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--max_steps", "did you mean `train.max_steps`?"),
        ("--num-train-epochs", "in finray: `train.epochs`"),
        ("--train.max_steps=4", "section.field=value"),
    ],
)
def test_a_field_that_is_given_as_an_option_is_told_how_fields_are_set(option: str, hint: str) -> None:
    code, _, said = runs.finray("train", "run.yaml", option, "4")
    assert code == 2
    assert "fields are set as words" in " ".join(said.replace("│", " ").split())
    assert hint in " ".join(said.replace("│", " ").split())
    assert "fields are set" not in runs.finray("version", option)[2]


def test_a_dash_for_the_file_of_prompts_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    from finray.evaluation import generate

    asked: list[str] = []

    def answer(model: Path, prompts: Any, **options: Any) -> Any:
        asked.extend(prompt.text for prompt in prompts)
        return generate.Answers(tuple(prompts), tuple("ok" for _ in prompts))

    monkeypatch.setattr(generate, "generate_text", answer)
    monkeypatch.setattr("sys.stdin", StringIO("two\n\nthree\n"))
    code, out, said = runs.finray("generate", "model", "one", "--file", "-")
    assert (code, out.split(), asked) == (0, ["ok"] * 3, ["one", "two", "three"]), said


def test_before_the_first_run_a_config_has_no_prepared_data_and_a_directory_that_is_named_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("{model: {name: m}, data: {source: rows.jsonl}}")
    for words in (["list"], ["verify"], ["prune", "--all"]):
        code, out, err = runs.finray("cache", *words, "my.yaml")
        assert (code, err) == (0, ""), words
        assert words == ["verify"] or "0 " in out, words
        assert runs.finray("cache", *words, "elsewhere")[0] == 2, words
    assert not Path("runs").exists()


def test_the_directory_of_a_run_is_no_config_and_its_copy_is_named(tmp_path: Path) -> None:
    run, empty = tmp_path / "run", tmp_path / "empty"
    for folder in (run, empty):
        folder.mkdir()
    (run / "config.yaml").write_text("{}")
    code, _, err = runs.finray("plan", str(run))
    assert code == 2
    assert "the directory of a run" in err
    assert str(run / "config.yaml") in err
    assert "the directory of a run" not in runs.finray("plan", str(empty))[2]


def test_the_cache_of_a_directory_of_runs_is_the_one_beside_them(tmp_path: Path) -> None:
    (tmp_path / ".prepared").mkdir()
    assert f"0 in {tmp_path / '.prepared'}" in runs.finray("cache", "list", str(tmp_path))[1]
    assert f"0 in {tmp_path / '.prepared'}" in runs.finray("cache", "list", str(tmp_path / ".prepared"))[1]


def test_a_number_that_is_too_wide_for_its_column_continues_below() -> None:
    """One that was cut off would be another number."""
    table = results.Table("tokens", "source")
    table.add_row("490,123,456", "a/long/path/to/rows.jsonl")
    out = StringIO()
    Console(file=out, width=24).print(table)
    cells = [line.split("│")[1:3] for line in out.getvalue().splitlines() if line.startswith("│")]
    assert "".join(left.strip() for left, _ in cells) == "490,123,456"
    assert "".join(right.strip() for _, right in cells) == "a/long/path/to/rows.jsonl"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dpo", "run.yaml"], "write `train.objective: dpo`"),
        (["plan", "smollm2-lora", "train.objective=cpo"], "finray has no training on preferences of this kind yet"),
        (["plan", "smollm2-lora", "train.objective=DPO"], "did you mean `dpo`?"),
        (["plan", "smollm2-lora", "train.objective=ipo"], "`preference.loss: ipo`"),
        (["tune"], "finray has no sweeps over settings yet"),
        (["sft", "run.yaml"], "Did you mean 'train'?"),
        (["merge", "runs/x"], "Did you mean 'export'?"),
        (["plan", "smollm2-lora", "model.task=reward_model"], "write `train.objective: reward`"),
        (["plan", "smollm2-lora", "stage=dpo"], "(write `train.objective: dpo`"),
        (["plan", "smollm2-lora", "train.max_grad_norm=0"], "null clips nothing"),
    ],
)
def test_what_other_systems_have_is_answered_for(words: list[str], said: str) -> None:
    code, _, err = runs.finray(*words)
    assert (code, said in " ".join(err.replace("│", " ").split())) == (2, True), err


def test_a_config_of_another_system_is_told_of_convert(tmp_path: Path) -> None:
    (tmp_path / "lf.yaml").write_text("model_name_or_path: m\nstage: sft\ndataset: d\nlora_rank: 8\n")
    (tmp_path / "ax.yaml").write_text("base_model: m\ndatasets: [{path: d, type: alpaca}]\nadapter: lora\n")
    # TRL's name their model so, too, and a config of finray's own may have a name too many.
    (tmp_path / "trl.yaml").write_text("model_name_or_path: m\ndataset_name: d\n")
    (tmp_path / "own.yaml").write_text("model: {name: m}\ndata: {source: d}\nbase_model: m\ndatasets: d\n")
    for name, told in (("lf", True), ("ax", True), ("trl", False), ("own", False)):
        err = runs.finray("plan", tmp_path / f"{name}.yaml")[2]
        assert (f"`finray convert {tmp_path / name}.yaml" in err, "problem" in err) == (told, not told), err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["plan", "{}.yaml"], "file"),
        (["convert", "{}.yml"], "file"),
        (["import-gguf", "{}.gguf", "out"], "file"),
        (["generate", "runs/x", "--file", "{}.txt"], "file"),
        (["generate", "runs/x", "hi", "--tools", "{}.json"], "file"),
        (["export", "{}", "-o", "out"], "directory"),
        *(([name, "list", "{}"], "directory") for name in ("runs", "cache")),
        *(([name, "{}"], "directory") for name in ("report", "watch", "sync", "evaluate", "serve", "chat", "push")),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said_in_the_same_words(words: list[str], what: str) -> None:
    name = f"runs/nowhere{len(words)}"
    code, _, err = runs.finray(*(word.replace("{}", name) for word in words))
    first, repair = err.splitlines()[:2]
    assert (code, repair.startswith("  repair: ")) == (2, True), err
    assert f"{name}" in first
    assert first.endswith(f": the {what} does not exist"), err


def test_a_quiet_plan_shows_problems_alone(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"model: {{name: {tmp_path}/none}}\ndata: {{source: {tmp_path}/d.jsonl}}\n")
    code, out, _ = runs.finray("plan", tmp_path / "run.yaml", "--quiet")
    assert (code, {line.partition(":")[0].strip() for line in out.splitlines()}) == (2, {"problem", "repair"})
    assert "placement" in runs.finray("plan", tmp_path / "run.yaml")[1]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("final/config.json", "this is a run; its model is {}/final"),
        ("final/adapter_config.json", "this is a run; `adapter.start_from={}` continues its adapter"),
        ("adapter_config.json", "this is an adapter; `adapter.start_from={}` continues it"),
        ("other.json", "give a model directory"),
    ],
)
def test_a_run_that_is_named_as_a_model_is_told_where_its_model_is(file: str, said: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}")
    with pytest.raises(ModelError) as caught:
        check_exists(str(tmp_path))
    assert str(caught.value.repair).startswith(said.replace("{}", str(tmp_path)))
