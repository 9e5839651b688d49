"""The prepared dataset: what goes in comes out; equal inputs give equal bytes; anything else gives another name."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from finray import files
from finray.config.load import build_config, load_config
from finray.config.schema import DataConfig, ModelConfig
from finray.config.tasks import task_spec
from finray.data.dataset import plan, prepare
from finray.data.dataset.manifest import PartResult
from finray.data.dataset.parts import PartWriter
from finray.data.dataset.plan import Part
from finray.data.dataset.prepare import check_inputs, plan_preparation, prepare_here
from finray.data.dataset.prepared import PreparedDataset, Splits
from finray.data.sampling.collate import collate
from finray.data.storage import Digests, Folder
from finray.errors import ConfigError, DataError
from tests.support import damaged, runs, tiny
from tests.support.preparing import Preparing
from tests.support.preparing import preparing as preparing

Run = Callable[..., Path]


@pytest.fixture
def run(tokenizer: Any, tmp_path: Path, write_rows: Callable[..., Path]) -> Run:
    """Prepare rows, or a file of them, with the tokenizer as it is now; the directory."""

    def prepare(rows: list[Any] | Path, *, cache: str = "c", **fields: Any) -> Path:
        model = tmp_path / "model"
        tokenizer.save_pretrained(str(model))
        (model / "config.json").write_text("{}", encoding="utf-8")
        source = str(write_rows(rows) if isinstance(rows, list) else rows)
        data = {"max_length": 64, "source": source, **fields}
        return Path(
            prepare_here(
                build_config({"model": {"name": str(model)}, "data": data}, source="test"), root=tmp_path / cache
            )
        )

    return prepare


def split_of(folder: Path, *, seed: int = 0, **data: Any) -> Splits:
    return PreparedDataset(folder).splits(DataConfig(source="x", **data), seed=seed)


def test_rows_come_back_as_they_were(tokenizer: Any, run: Run) -> None:
    rows = tiny.chat_rows(2500)
    split = split_of(run(rows)).train
    assert len(split) == 2500
    assert split.source_rows.tolist() == list(range(2500))
    for number in (0, 1, 1023, 1024, 2499):
        ids, mask = split.row(number)
        text = tokenizer.decode(ids)
        assert all(message["content"] in text for message in rows[number]["messages"])
        learned = tokenizer.decode(ids[mask.astype(bool)])
        assert learned == rows[number]["messages"][1]["content"] + "<|im_end|>"
        assert split.lengths[number] == len(ids)
        assert split.supervised[number] == mask[1:].sum()


def test_a_prompt_with_the_answer_to_another_one_depends_on_the_row_alone(tokenizer: Any, run: Run) -> None:
    # Neighbours with one prompt, half of all rows with another.
    asked = [f"what is {number // 3}" if number < 30 else "say" for number in range(60)]
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"{number} of {text}"}]}
        for number, text in enumerate(asked)
    ]
    split = split_of(run(rows)).train
    answers = set()
    for number, text in enumerate(asked):
        (ids, mask), (own, learned) = split.mismatched(number, most=64), split.row(number)
        prompt = int(learned.argmax())
        assert ids[:prompt].tolist() == own[:prompt].tolist()
        said = tokenizer.decode(ids[mask == 1]).removesuffix("<|im_end|>")
        assert int(mask.argmax()) == prompt
        other = int(said.split()[0])
        assert said == f"{other} of {asked[other]}"
        assert asked[other] != text
        answers.add(other)
        some = split.take(np.array([number]))
        short = [part.tolist() for part in some.mismatched(0, most=prompt + 1)]
        assert short == [part[: prompt + 1].tolist() for part in (ids, mask)]
    assert len(answers) > 25
    # Where there is no other prompt, any answer.
    only = split_of(run(rows[30:], cache="d")).train
    assert tokenizer.decode(only.mismatched(3, most=64)[0]).count(" of say") == 1


def test_equal_inputs_give_equal_bytes_and_are_prepared_once(run: Run) -> None:
    first, second = (run(tiny.chat_rows(40), cache=cache) for cache in ("c", "d"))
    assert first.name == second.name
    for path in first.rglob("*.*"):
        assert path.read_bytes() == (second / path.relative_to(first)).read_bytes()
    marker = first / "train" / "tokens-00000.arrow"
    before = marker.stat().st_mtime_ns
    assert run(tiny.chat_rows(40)) == first
    assert marker.stat().st_mtime_ns == before


SHAPING: list[dict[str, Any]] = [
    {"model.chat_template_arguments": {"enable_thinking": False}},
    {"model.new_tokens": ["<a>"]},
    {"data.format": "messages"},
    {"data.field_mapping": {"messages": "turns"}},
    {"data.input_template": "{a}", "data.output_template": "{b}"},
    {"data.input_template": "{a}", "data.output_template": "{c}"},
    {"data.converter": "json:dumps"},
    {"data.group_by": "id"},
    {"data.system": "Be brief."},
    {"data.tool_format": "hermes"},
    {"data.train_on": "all"},
    {"data.max_length": 77},
    {"data.on_too_long": "drop"},
    {"data.on_bad_row": "drop"},
    {"prepare.chunk_overlap": 8},
]
NOT_SHAPING: list[dict[str, Any]] = [
    {"data.eval_ratio": 0.3},
    {"data.packing": False},
    {"run.seed": 5},
    {"run.name": "other"},
    {"train.max_steps": 3},
    {"adapter.rank": 3},
    {"prepare.num_workers": 1},
]


def test_the_name_is_that_of_all_that_shapes_the_rows_and_of_nothing_else(
    tiny_model_dir: Path, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    model, source = shutil.copytree(tiny_model_dir, tmp_path / "model"), write_rows(tiny.chat_rows(3))
    plain = {"model.name": str(model), "data.source": str(source)}
    plain |= {"run.output_dir": str(tmp_path), "data.eval_ratio": 0.1}

    def name(change: dict[str, Any]) -> str:
        return plan_preparation(load_config({}, {**plain, **change})).name

    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}", encoding="utf-8")
    templates = [{"model.chat_template": text} for text in (str(template), "{{ messages }}", "{{ messages }}!")]
    names = [name(change) for change in ({}, *templates, *SHAPING)]
    assert len(set(names)) == len(names)
    assert {name(change) for change in NOT_SHAPING} == {names[0]}
    # The tokens at which a server stops end what is learned.
    for stops in (5, [5, 7]):
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}), encoding="utf-8")
        names.append(name({}))
    for file in (source, model / "tokenizer.json", model / "chat_template.jinja"):
        file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        names.append(name({}))
    assert len(set(names)) == len(names)


def test_nothing_to_learn_is_an_error(tmp_path: Path, run: Run) -> None:
    rows = [{"messages": [{"role": "user", "content": "one"}]}] * 3
    with pytest.raises(DataError, match="none of the 3 rows has a token to train on"):
        run(rows)
    assert not [path for path in (tmp_path / "c").iterdir() if not path.name.startswith((".locks", ".digests"))]


def test_a_task_from_outside_says_which_rows_it_learns_from(
    tokenizer: Any, tmp_path: Path, write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`finray train` refuses text with a label by what the task says of itself, not by its name."""
    tokenizer.save_pretrained(str(tmp_path / "model"))
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "own_task.py").write_text(
        "from dataclasses import replace\nfrom finray.config.tasks import CAUSAL_LM\n"
        "class Classes:\n    spec = replace(CAUSAL_LM, name='classes', rows=frozenset({'labelled'}))\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    data = {"source": str(write_rows([{"text": "one", "label": 1}])), "format": "labelled_text"}
    own, causal = (
        build_config({"model": {"name": str(tmp_path / "model"), "task": task}, "data": data}, source="test")
        for task in ("own_task:Classes", "causal_lm")
    )
    check_inputs(own)
    with pytest.raises(DataError, match=r"for classification, but model\.task is causal_lm"):
        check_inputs(causal)
    dataset = PreparedDataset(prepare_here(own, root=tmp_path / "c"))
    dataset.require_kind(task_spec(own.model.task))
    with pytest.raises(DataError, match="the rows are labelled, but causal_lm needs chat, completion, text"):
        dataset.require_kind(task_spec(causal.model.task))


def test_a_directory_without_a_manifest_is_no_prepared_data_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a prepared dataset"):
        PreparedDataset(tmp_path)


def test_collation_restarts_positions_and_never_predicts_across_rows(run: Run) -> None:
    folder = run([{"text": "one two"}, {"text": "three"}])
    split = split_of(folder).train
    batch = collate([split.row(0), split.row(1)], [0, 1])
    first = int(split.lengths[0])
    assert batch.positions_1T[0].tolist() == [*range(first), *range(int(split.lengths[1]))]
    assert batch.cu_seqlens.tolist() == [0, first, batch.tokens]
    # The last token of the first row predicts nothing.
    assert first - 1 not in batch.target_positions_K.tolist()
    assert len(batch.targets_K) == split.supervised.sum() == batch.tokens - 2
    assert batch.targets_K.tolist() == [int(batch.tokens_1T[0, at + 1]) for at in batch.target_positions_K]
    assert json.loads((folder / "manifest.json").read_text())["splits"]["train"]["kind"] == "text"


# --- changed after it was prepared ------------------------------------------------------------------------------------


def test_changed_tokens_of_the_same_size_are_refused_by_name_before_a_row_is_read(run: Run) -> None:
    folder = run(tiny.chat_rows(40))
    file = folder / "train" / "tokens-00000.arrow"
    dataset = PreparedDataset(folder)
    runs.flip(file)
    for read in (dataset.verify, lambda: dataset.splits(DataConfig(source="x"), seed=0).train.row(0)):
        with pytest.raises(DataError, match="has changed since it was written") as caught:
            read()
        assert caught.value.where == str(file)
        assert caught.value.repair == f"delete {folder} and run the command again"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DataError, match="missing or cut off"):
        PreparedDataset(folder)


def test_every_rank_compares_another_share_and_then_nobody_again(
    run: Run, write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(tiny.chat_rows(40), eval_source=str(write_rows(tiny.chat_rows(5, start=50), "eval.jsonl")))
    compared: list[str] = []
    real = files.digest_of

    def spy(path: Path) -> str:
        compared.append(path.relative_to(folder).as_posix())
        return real(path)

    monkeypatch.setattr(files, "digest_of", spy)
    everything = [name for name, _ in PreparedDataset(folder).files()]
    assert len(everything) == 4
    for rank in range(3):
        dataset = PreparedDataset(folder)
        dataset.verify(rank=rank, world_size=3)
    assert sorted(compared) == sorted(everything)
    dataset.trust()
    splits = dataset.splits(DataConfig(source="x"), seed=0)
    splits.train.row(0)
    assert len(compared) == len(everything)
    # Who was in no group compares what it reads, once.
    splits = PreparedDataset(folder).splits(DataConfig(source="x"), seed=0)
    for _ in range(2):
        splits.train.row(0)
    assert sorted(compared[4:]) == ["eval/index-00000.arrow", "train/index-00000.arrow", "train/tokens-00000.arrow"]


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_one_flipped_bit_or_a_cut_anywhere_is_noticed(data: st.DataObject, run: Run) -> None:
    folder = run(tiny.chat_rows(10))
    said = PreparedDataset(folder).manifest
    file = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
    content = file.read_bytes()
    damaged.draw(file, data)
    try:
        # Without its last line end, JSON says the same.
        assume(file.suffix != ".json" or file.read_bytes() != content.rstrip())
        with pytest.raises(DataError) as caught:
            PreparedDataset(folder).verify()
        assert caught.value.where == str(file)
    finally:
        file.write_bytes(content)
    PreparedDataset(folder).verify()
    assert PreparedDataset(folder).manifest == said


def test_a_manifest_without_a_seal_is_read_as_before_and_must_fit_itself(run: Run) -> None:
    """Older versions wrote none."""
    folder = run(tiny.chat_rows(10))
    sealed = PreparedDataset(folder).manifest
    content = json.loads((folder / "manifest.json").read_text())
    del content["seal"]
    (folder / "manifest.json").write_text(json.dumps(content, indent=1) + "\n")
    assert PreparedDataset(folder).manifest == sealed
    assert run(tiny.chat_rows(10)) == folder
    for change in ({"content": "0" * 64}, {"shaped_by": {}}, {"fingerprint": "0" * 24}, {"more": 1}):
        (folder / "manifest.json").write_text(json.dumps(content | change))
        with pytest.raises(DataError, match="was changed after it was written"):
            PreparedDataset(folder)


@pytest.mark.parametrize("chat_first", [True, False])
def test_a_mix_of_chat_and_text_is_chat_in_any_order_and_its_text_has_no_prompts(
    preparing: Preparing, tmp_path: Path, chat_first: bool
) -> None:
    (tmp_path / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in tiny.chat_rows(3)))
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    mix = [{"source": str(tmp_path / name)} for name in ("chat.jsonl", "text.jsonl")]
    dataset = preparing.dataset(mix=mix if chat_first else mix[::-1])
    assert dataset.kind() == "chat"
    rows = dataset.all_rows("train")
    assert rows is not None
    assert rows.streams[rows.prompted].tolist() == [0 if chat_first else 1] * 3
    assert rows.take(rows.prompted[::-1]).prompted.tolist() == [0, 1, 2]
    # Older manifests know the first row only.
    manifest = Path(dataset.folder.at("manifest.json"))
    content = json.loads(manifest.read_text())
    del content["seal"]
    for stream in content["splits"]["train"]["streams"]:
        del stream["parts"][0]["kind"]
    manifest.write_text(json.dumps(content))
    older = PreparedDataset(dataset.folder.root)
    assert older.kind() == ("chat" if chat_first else "text")
    assert older.content == dataset.content


def test_a_damaged_manifest_is_said_and_the_data_prepared_again(preparing: Preparing, tmp_path: Path) -> None:
    config = preparing.config(tiny.write_chat_rows(tmp_path, 10))
    folder = Path(prepare_here(config, root=tmp_path / "c"))
    before = {path.name: path.read_bytes() for path in folder.rglob("*.*")}
    runs.flip(folder / "manifest.json")
    told: list[Any] = []
    with prepare.start_preparation(config, root=tmp_path / "c") as preparation:
        assert preparation.result(handle=told.append) == str(folder)
    assert told[0].level == "warning"
    assert f"{folder / 'manifest.json'} is damaged" in told[0].message
    assert {path.name: path.read_bytes() for path in folder.rglob("*.*")} == before


def test_the_identity_of_a_tokenizer_that_is_not_in_files_is_that_of_what_makes_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fake:
        chat_template: Any = "{{ messages }}"
        bos_token_id = 1
        eos_token_id = 2
        merges = "a b"

        @property
        def backend_tokenizer(self) -> Any:
            return SimpleNamespace(to_str=lambda: self.merges)

    fake = Fake()
    monkeypatch.setattr(plan, "tokenizer_files", lambda model: None)
    monkeypatch.setattr(plan, "load_tokenizer", lambda model: fake)

    def identity(**change: Any) -> str:
        with monkeypatch.context() as patch:
            for name, value in change.items():
                patch.setattr(fake, name, value, raising=False)
            return plan.tokenizer_identity(ModelConfig(name="someone/model"), Digests(None))

    parts: list[dict[str, Any]] = [{}, {"merges": "a c"}, {"bos_token_id": None}, {"eos_token_id": 3}]
    parts += [{"chat_template": "{{ tools }}"}, {"chat_template": {"default": "a", "tools": "b"}}]
    parts += [{"bos_token_id": 2, "eos_token_id": 1}]
    assert len({identity(**change) for change in parts}) == len(parts)
    # Templates by name, in whatever order a library gives them.
    assert identity(chat_template={"tools": "b", "default": "a"}) == identity(**parts[5])


def test_a_chat_template_that_is_not_there_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = ModelConfig(name=str(tiny_model_dir), chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(DataError, match="the chat template does not exist") as caught:
        plan.tokenizer_identity(model, Digests(None))
    assert caught.value.where == f"model.chat_template={tmp_path / 'none.jinja'}"


# --- helpers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(preparing: Preparing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """A preparation of several parts whose own thread is kept at its first until ``go`` is set."""
    monkeypatch.setattr("finray.data.sources.pieces.PIECE_BYTES", 1000)
    begun, go, real = threading.Event(), threading.Event(), PartWriter.write

    def write(self: PartWriter, part: Part) -> PartResult:
        if threading.current_thread().name == "finray-prepare":
            begun.set()
            assert go.wait(60)
        return real(self, part)

    monkeypatch.setattr(PartWriter, "write", write)
    config = preparing.config(tiny.write_chat_rows(tmp_path, 40))
    planned = plan_preparation(config, root=str(tmp_path / "c"))
    writer = PartWriter(planned.settings, planned.settings.encoder(preparing.tokenizer), planned.scratch)
    with prepare.start_preparation(config, root=tmp_path / "c") as preparation:
        assert begun.wait(60)
        assert preparation.scratch == planned.scratch.root
        try:
            yield Held(preparation, writer, go, taken := [])
        finally:
            go.set()
            for _ in taken:
                preparation.give(DataError("the test ends"))


@dataclass
class Held:
    preparation: prepare.Preparation
    writer: PartWriter
    go: threading.Event
    taken: list[Part]

    def take(self) -> Part | None:
        part = self.preparation.take()
        if part is not None:
            self.taken.append(part)
        return part

    def answer(self, how: Callable[[Part], None]) -> None:
        how(self.taken.pop(0))


def test_what_helpers_write_is_what_one_process_writes(held: Held, preparing: Preparing, tmp_path: Path) -> None:
    assert (held.preparation.seconds_left, held.preparation.patience_s) == (None, 60.0)
    while held.take():
        pass
    numbers = [part.number for part in held.taken]
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) > 3
    told: list[Any] = []
    for _ in numbers[1:]:
        held.answer(lambda part: held.preparation.give(held.writer.write(part)))
    held.go.set()
    # The last part that was taken is waited for.
    assert not held.preparation.wait(0.3, handle=told.append)
    held.answer(lambda part: held.preparation.give(held.writer.write(part)))
    folder = Path(held.preparation.result(handle=told.append))
    assert [record.done for record in told] == list(range(1, len(numbers) + 2))
    assert {record.total for record in told} == {len(numbers) + 1}
    assert (told[-1].rows, held.preparation.seconds_left) == (40, 0.0)
    assert 10 < held.preparation.patience_s < 60
    assert [told[-1].tokens] == [PreparedDataset(folder).manifest.splits["train"].tokens]
    alone = Path(prepare_here(held.preparation.config, root=tmp_path / "alone"))
    contents = [{str(path.relative_to(one)): path.read_bytes() for path in one.rglob("*.*")} for one in (folder, alone)]
    assert contents[0] == contents[1]


def test_parts_that_are_taken_back_are_written_after_all(held: Held) -> None:
    while held.take():
        pass
    # What a helper that was killed has left of one.
    left = Path(held.writer._folder.root) / "train" / ".tokens-00001.arrow.77"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.touch()
    held.go.set()
    while held.taken:
        held.answer(held.preparation.take_back)
    folder = Path(held.preparation.result())
    assert len(PreparedDataset(folder).splits(DataConfig(source="x"), seed=0).train) == 40
    assert list(folder.rglob(".*")) == []


def test_after_an_error_nothing_is_removed_while_a_helper_writes(held: Held, tmp_path: Path) -> None:
    for _ in range(3):
        held.take()
    scratch = Path(held.writer._folder.root)
    held.answer(lambda _: held.preparation.give(DataError("row 7 is bad")))
    held.answer(lambda _: held.preparation.give(DataError("another")))
    held.go.set()
    assert not held.preparation.wait(0.3)
    assert scratch.is_dir()
    held.answer(held.preparation.take_back)
    with pytest.raises(DataError, match="row 7 is bad"):
        held.preparation.result()
    assert not scratch.exists()
    assert held.take() is None


def test_a_preparation_that_is_cancelled_waits_for_no_helper_and_takes_nothing_back(held: Held) -> None:
    for _ in range(2):
        held.take()
    held.preparation.cancel()
    assert held.take() is None
    held.answer(held.preparation.take_back)
    held.answer(held.preparation.take_back)
    assert held.take() is None
    held.go.set()
    assert held.preparation.wait(60)
    with pytest.raises(prepare._Cancelled):
        held.preparation.result()


def test_a_preparation_that_another_process_is_making_is_waited_for_and_said(
    preparing: Preparing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_PATIENCE_S", 0.05)
    config = preparing.config(tiny.write_chat_rows(tmp_path, 3))
    root = tmp_path / "c"
    name = plan_preparation(config, root=str(root)).name
    told: list[Any] = []
    with prepare.locked(str(root), name) as locked:
        assert locked
        with prepare.locked(str(root), name) as again:
            assert not again
        with prepare.locked(str(root), "another") as other:
            assert other
        preparation = prepare.start_preparation(config, root=root)
        while not told:
            assert not preparation.wait(0.05, handle=told.append)
    assert told[0].message == "another process is preparing the same data; waiting for it"
    assert preparation.result() == str(root / name)
    with prepare.locked("s3://bucket/c", name) as remote:
        assert remote


def test_a_source_that_changes_while_it_is_prepared_is_named(
    preparing: Preparing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.write_chat_rows(tmp_path, 3)
    real = PartWriter.write

    def write(self: PartWriter, part: Part) -> PartResult:
        result = real(self, part)
        source.write_text(source.read_text() + "\n{}\n")
        return result

    monkeypatch.setattr(PartWriter, "write", write)
    error = preparing.refused(source)
    assert "changed while it was being prepared" in error.message
    assert error.where == str(source)


@pytest.mark.parametrize("name", ["train/tokens-00000.arrow", "manifest.json"])
def test_a_full_disk_is_one_error_whatever_it_fails_at(
    preparing: Preparing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = Folder.adopt

    def adopt(self: Folder, scratch: Path, to: str) -> None:
        if self.at(to).endswith(name):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, scratch, to)

    monkeypatch.setattr(Folder, "adopt", adopt)
    error = preparing.refused(tiny.write_chat_rows(tmp_path, 3))
    assert error.message == "the prepared dataset cannot be written: No space left on device"


def test_a_split_without_a_source_says_what_to_set(preparing: Preparing, tmp_path: Path) -> None:
    source = str(tiny.write_chat_rows(tmp_path, 3))
    with pytest.raises((DataError, ConfigError), match=r"data\.source"):
        preparing.dataset(mix=[{"source": source}], test_split="test")


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"format_version": 3}, "has format version 3; this finray reads 2"),
        ({"format_version": 1}, "has format version 1; this finray reads 2"),
        ({}, "was changed after it was written"),
        ({"format_version": 2}, "was changed after it was written"),
    ],
)
def test_a_manifest_of_another_version_is_named_before_its_digests_are_compared(
    preparing: Preparing, tmp_path: Path, shape: dict[str, Any], said: str
) -> None:
    folder = Path(preparing.dataset(tiny.write_chat_rows(tmp_path, 3)).folder.root)
    plain = json.loads((folder / "manifest.json").read_text())
    plain["shaped_by"] = shape
    # As versions before there was a seal wrote it, and with one that is wrong.
    for content in ({name: plain[name] for name in ("fingerprint", "content", "shaped_by", "splits")}, plain):
        (folder / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(DataError) as caught:
            PreparedDataset(folder)
        assert said in caught.value.message or (content is plain and "format version" not in said)
        assert str(folder / "manifest.json") in str(caught.value.where)
    (folder / "manifest.json").write_text(json.dumps({**plain, "shaped_by": [1]}))
    with pytest.raises(DataError) as caught:
        PreparedDataset(folder)
    assert "format version" not in caught.value.message
