"""The datasets of a config of LLaMA-Factory or Axolotl as sources of finray: entries of `data.mix`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from typing_extensions import TypedDict

from finray.config.convert_file import ForeignFile
from finray.config.foreign import AXOLOTL, SENTENCES, number, words
from finray.errors import ConfigError
from finray.files import FileKind

# Axolotl's `path` may be a builder of `datasets`, with files beside it.
_BUILDERS = ("json", "csv", "parquet", "text", "arrow")
# Fields of a message that finray hands to the chat template as they are.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Names of roles that finray knows.
_ROLES = ("system", "user", "human", "assistant", "gpt", "tool", "observation", "function_call")
_CONVERTER = "not supported: rename it with your own function, `data.converter`"
# Why a key of a dataset is not carried over.
_WHY = {
    "chat_template": SENTENCES["chat_template"],
    "chat_template_jinja": SENTENCES["chat_template_jinja"],
    "shards": "for a part of the rows use `data.train_split: train[:10%]`",
    "roles_to_train": "`data.train_on` is assistant, last_assistant, completion or all",
    "train_on_eos": "not supported: the end-of-turn token is always trained on",
    "train_on_eot": "not supported: the end-of-turn token is always trained on",
    "roles": _CONVERTER,
    "drop_system_message": "not supported: system messages are kept; `data.converter` can remove them",
    "message_field_training": "finray reads the field `train` of a message; `data.converter` can rename it",
    "trust_remote_code": "not supported: datasets with their own code are not loaded",
}

_TABLES = FileKind(
    ConfigError, repair="write a dataset_info.json as LLaMA-Factory reads it, or leave it out", links=True
)


class _Listed(TypedDict, total=False):
    """A dataset in LLaMA-Factory's table, as far as finray reads it."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    file_name: str | None
    hf_hub_url: str | None
    cloud_file_name: str | None
    folder: str | None
    subset: str | None
    split: str | None
    revision: str | None
    num_samples: int | None
    formatting: str | None
    ranking: bool | None
    columns: dict[str, str | None] | None
    tags: dict[str, str | None] | None


def read_data(file: ForeignFile) -> None:
    """The rows to train on, those to evaluate on, and how they are packed."""
    file.put("data.max_length", file.get("cutoff_len", "sequence_len", "max_seq_length"))
    objective = file.out.get("train", {}).get("objective", "sft")
    data = ForeignData(file.raw, file.path, file.dataset_info, file.lose, objective, file.notes)
    if file.system == AXOLOTL:
        packs = bool(file.get("sample_packing"))
        given = _sources(file, "datasets", "pretraining_dataset")
        sources = [source for dataset in given for source in data.axolotl(dataset)]
        held = [source for dataset in _sources(file, "test_datasets") for source in data.axolotl(dataset)]
        if file.raw.get("datasets") and file.raw.get("pretraining_dataset"):
            file.lose("pretraining_dataset", "`datasets` is read; further sources can be added to data.mix")
        elif file.raw.get("pretraining_dataset"):
            file.notes.append("all rows are prepared before the training; data.train_split takes a part of them")
        # Axolotl drops conversations that are too long. Plain text is cut into pieces.
        long = file.get("excess_length_strategy")
        if long is not None or any(source.get("format") != "text" for source in sources):
            file.put("data.on_too_long", {"raise": "error"}.get(long, long or "drop"), "excess_length_strategy")
    else:
        pretraining = file.raw.get("stage") == "pt"
        packs = bool(file.get("neat_packing") or file.get("packing"))
        packs |= pretraining and file.raw.get("packing") is None
        limit = file.get("max_samples")
        sources = [data.factory(name, limit) for name in words(file.get("dataset"))]
        held = [data.factory(name, limit, held=True) for name in words(file.get("eval_dataset"))]
        file.used.update(("dataset_dir", "preprocessing_num_workers"))
        if pretraining:
            file.put("data.train_on", "all")
    file.used.update(("eval_sample_packing", "eval_packing"))
    if not sources:
        raise ConfigError("the config names no data", where=f"{file.path}: dataset")
    if len(sources) == 1:
        for name, value in sources[0].items():
            file.put(f"data.{'train_split' if name == 'split' else name}", value)
    else:
        # Plain text is learned whole, whatever `train_on` says.
        learned = [source.pop("train_on", None) for source in sources]
        if all(learned):
            file.put("data.train_on", learned[0])
        file.put("data.mix", sources)
    _share_rows(file, sources)
    if file.get("train_on_inputs") or file.get("train_on_prompt"):
        file.put("data.train_on", "all")
    if objective == "sft":
        file.put("data.packing", packs)
    share = file.get("val_size", "val_set_size")
    sized = file.key("val_size", "val_set_size")
    named = "test_datasets" if file.system == AXOLOTL else "eval_dataset"
    if held:
        _hold_out(file, held, named)
        if share:
            file.lose(sized, f"`{named}` has the rows to evaluate on")
    elif share:
        # From 2 on a number of rows, for all three.
        file.put("data.eval_ratio", int(share) if share > 1 else share, sized)


def _hold_out(file: ForeignFile, held: list[dict[str, Any]], key: str) -> None:
    """The evaluation rows: read with the data section's format and columns, without its subset and revision."""
    first, here = held[0], file.out["data"]
    file.put("data.eval_source", first["source"])
    if "split" in first:
        file.put("data.eval_split", first["split"])
    for name in ("subset", "revision"):
        if name in first:
            file.lose(f"{key}.{name}", "not supported: `data.eval_source` has none of its own", first[name])
    for name in ("format", "field_mapping", "input_template", "output_template"):
        if first.get(name) != here.get(name):
            file.lose(f"{key}.{name}", f"`data.{name}` is for the evaluation rows too", first.get(name))
    if len(held) > 1:
        file.notes.append("only one evaluation source is supported: data.eval_source")


def _share_rows(file: ForeignFile, sources: list[dict[str, Any]]) -> None:
    """LLaMA-Factory's probabilities of several datasets, as weights; `concat` takes all rows, as finray does."""
    keys = ("mix_strategy", "interleave_probs")
    strategy, shares = file.get(keys[0]) or "concat", [number(text) for text in words(file.get(keys[1]))]
    if len(sources) < 2 or strategy == "concat":
        return
    if len(shares) == len(sources) and all(isinstance(part, int | float) and part > 0 for part in shares):
        for source, share in zip(sources, shares, strict=True):
            source["weight"] = share
        file.notes.append("a mix has as many rows as its sources; there it ends with the first or last of them")
        return
    for key in keys:
        if file.raw.get(key) is not None:
            file.lose(key, "set data.mix.N.weight, the share of each dataset")


def _sources(file: ForeignFile, *keys: str) -> list[Any]:
    sources = file.get(*keys) or []
    return sources if isinstance(sources, list) else [sources]


@dataclass
class ForeignData:
    """Reads the datasets of one config."""

    raw: Mapping[str, Any]  # the config
    path: Path  # its file
    dataset_info: Path | None  # LLaMA-Factory's table of datasets, if it is not where the file says
    lose: Callable[[str, str, Any], None]  # called with a setting that is not carried over, the reason, and its value
    objective: str = "sft"  # of the run
    notes: list[str] = field(default_factory=list)  # what the user should check

    def note(self, text: str) -> None:
        """Add a note once."""
        if text not in self.notes:
            self.notes.append(text)

    # --- LLaMA-Factory ----------------------------------------------------------------------------------------------

    def factory(self, name: str, limit: int | None, *, held: bool = False) -> dict[str, Any]:
        """A dataset of LLaMA-Factory, by its name in `dataset_info.json`; ``held``: for evaluation."""
        folder = str(self.raw.get("dataset_dir") or "data")
        part = f"[:{limit}]" if limit else ""
        if folder == "ONLINE":
            return {"source": name} | ({"split": f"train{part}"} if part or held else {})
        remote = folder.removeprefix("REMOTE:") if folder.startswith("REMOTE:") else None
        table, where = dict[str, Any](), Path()
        tables = [self.dataset_info] if self.dataset_info else []
        tables += [self.path.parent / folder / "dataset_info.json", Path(folder) / "dataset_info.json"]
        for file in tables:
            # As `is_file`, which raises where a name is too long.
            if os.path.isfile(file):  # noqa: PTH113
                table, where = _TABLES.json(file, dict[str, Any]), file
                folder = str(file.parent)
                break
        if remote is not None:
            folder = f"hf://datasets/{remote}"
        if name not in table:
            self.note(
                f"{name} is a name in the dataset_info.json of {folder}; --dataset-info FILE reads a copy of it"
                if remote
                else f"{name} is a name in LLaMA-Factory's dataset_info.json, and data/{name}.json its usual place; "
                "--dataset-info FILE reads the table"
            )
            source = f"{folder if remote else 'data'}/{name}.json"
            return {"source": source} | ({"split": f"train{part}"} if part else {})
        about: dict[str, Any] = {
            **_TABLES.parsed(json.dumps({name: table[name]}).encode(), dict[str, _Listed], where)[name]
        }
        there = about.get("hf_hub_url") or about.get("cloud_file_name")
        entry: dict[str, Any] = {"source": there or f"{folder}/{about.get('file_name') or name}"}
        if about.get("hf_hub_url") and about.get("folder"):
            entry["source"] += f":{about['folder']}"
        if about.get("subset"):
            entry["subset"] = about["subset"]
        read = {*_Listed.__annotations__} - ({"revision"} if not about.get("hf_hub_url") else set())
        if about.get("hf_hub_url") and about.get("revision"):
            entry["revision"] = about["revision"]
        if (most := about.get("num_samples")) is not None:
            self.note(f"num_samples of {name} in dataset_info.json takes rows at random there, and the first ones here")
            limit = min(most, limit or most)
        if about.get("split") or limit or (held and about.get("hf_hub_url")):
            entry["split"] = self._first(name, about.get("split") or "train", limit)
        carried = ["messages", "tools", "prompt", "query", "response", "history", "system"]
        if self.objective != "sft":
            carried += ["kto_tag"] if self.objective == "kto" else ["chosen", "rejected"]
        else:
            read.discard("ranking")
        odd = [key for key, value in about.items() if key not in read and value]
        columns = about.get("columns") or {}
        odd += [f"columns.{key}" for key, column in columns.items() if column and key not in carried]
        for key in odd:
            self.note(f"{key} of {name} in dataset_info.json is not carried over")
        return entry | self._factory_format(name, about)

    def _first(self, name: str, split: str, limit: int | None) -> str:
        """The first rows of a split, which may be a slice."""
        if not limit:
            return split
        if (match := re.fullmatch(r"(\w+)(?:\[(\d*):(\d*)\])?", split)) is None:
            self.note(f"max_samples of {name} is not applied to {split}: a split takes one slice")
            return split
        start = int(match[2] or 0)
        stop = min(start + limit, int(match[3])) if match[3] else start + limit
        return f"{match[1]}[{start or ''}:{stop}]"

    def _factory_format(self, name: str, about: Mapping[str, Any]) -> dict[str, Any]:
        columns, tags = about.get("columns") or {}, about.get("tags") or {}
        kind, here = "alpaca", {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
        if self.raw.get("stage") == "pt":
            kind, here, columns = "text", {"prompt": "text"}, columns or {"prompt": "instruction"}
        elif about.get("formatting") == "openai" or tags.get("role_tag") == "role":
            kind, here = "messages", {"messages": "messages", "tools": "tools"}
        elif about.get("formatting") == "sharegpt":
            kind, here = "sharegpt", {"messages": "conversations", "tools": "tools"}
        if kind in ("alpaca", "sharegpt"):
            here["system"] = "system"
        if kind == "messages" and "messages" not in columns:
            columns = {"messages": "conversations", **columns}
        content = tags.get("content_tag", "content" if kind == "messages" else "value")
        odd = [value for key, value in tags.items() if key.endswith("_tag") and key not in ("role_tag", "content_tag")]
        if tags and (
            content not in ("content", "value")
            or tags.get("role_tag", "from") not in ("role", "from")
            or any(value not in _ROLES for value in odd)
        ):
            self.note(f"the tags of {name} in dataset_info.json are {_CONVERTER}")
        is_ranking = self.objective not in ("sft", "kto")
        if is_ranking:
            # The answers have columns of their own, and the format is detected.
            here |= {"chosen": "chosen", "rejected": "rejected"}
            here.pop("response", None)
        elif self.objective == "kto":
            here["kto_tag"] = "label"
        mapping = {here[there]: column for there, column in columns.items() if column and there in here}
        mapping = {field: column for field, column in mapping.items() if field != column}
        if is_ranking:
            return {"field_mapping": mapping} if mapping else {}
        return {"format": kind} | ({"field_mapping": mapping} if mapping else {})

    # --- Axolotl ----------------------------------------------------------------------------------------------------

    def axolotl(self, dataset: Any) -> list[dict[str, Any]]:
        """One of Axolotl's `datasets`: a source for each of its files."""
        about: dict[str, Any] = dict(dataset) if isinstance(dataset, Mapping) else {"path": dataset}
        places = self._places(about)
        source: dict[str, Any] = {}
        kind = about.pop("type", "pretrain" if "pretraining_dataset" in self.raw else None)
        words = re.split(r"[.:]", kind) if isinstance(kind, str) else [""]
        if self.objective != "sft":
            source |= self._axolotl_preferences(kind, about)
            words = words[:1]
        elif words[0] == "chat_template":
            source |= self._axolotl_chat(about)
        elif words[0] == "alpaca":
            source["format"] = "alpaca"
            self.note("rows of type alpaca: a text for Axolotl, and chat turns here if the model has a chat template")
        elif words[0] == "sharegpt":
            source["format"] = "sharegpt"
        elif words[0] in ("completion", "pretrain"):
            source |= {"format": "text", "train_on": "all"}
            named = about.pop("field", None), about.pop("text_column", None)
            if column := next((name for name in named if name not in (None, "text")), None):
                source["field_mapping"] = {"text": column}
        elif isinstance(kind, Mapping):
            source |= self._axolotl_template(kind)
        elif kind is None:
            self.note(f"datasets: {places[0]} has no type, so its rows are tokens for Axolotl; finray needs texts")
        else:
            self.note(f"datasets: type {kind} of {places[0]} is unknown; the format is detected from the columns")
        if len(words) > 1 and words[0] in ("alpaca", "sharegpt", "completion"):
            self.note(f"datasets: type {kind} is taken as {words[0]}")
        for there, here in (("name", "subset"), ("split", "split"), ("revision", "revision")):
            if value := about.pop(there, None):
                source[here] = value
        about.pop("ds_type", None)
        for key, value in about.items():
            # Without a role only the messages that are marked are learned.
            if value not in (None, False, "", [], {}) or (key == "roles_to_train" and value == []):
                self.lose(f"datasets.{key}", _WHY.get(key, "not supported"), value)
        return [{"source": place} | source for place in places]

    def _places(self, about: dict[str, Any]) -> list[Any]:
        """Where the rows are: a dataset, or its files."""
        path, files = about.pop("path", None), about.pop("data_files", None)
        if not files:
            return [path]
        files = files if isinstance(files, list) else [files]
        if path is None or path in _BUILDERS:
            return files
        if os.path.isdir(str(path)):  # noqa: PTH112
            return [f"{path}/{file}" for file in files]
        if re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path)):
            revision = about.pop("revision", None)
            return [f"hf://datasets/{path}{f'@{revision}' if revision else ''}/{file}" for file in files]
        return files

    def _axolotl_chat(self, about: dict[str, Any]) -> dict[str, Any]:
        mapping = about.pop("message_property_mappings", None)
        if mapping is not None and not isinstance(mapping, Mapping):
            self.lose("datasets.message_property_mappings", _CONVERTER, mapping)
        mapping = mapping if isinstance(mapping, Mapping) else {}
        role = mapping.get("role", about.pop("message_field_role", None)) or "role"
        content = mapping.get("content", about.pop("message_field_content", None)) or "content"
        kind, here = ("sharegpt", "conversations") if role == "from" else ("messages", "messages")
        if (role, content) not in (("from", "value"), ("role", "content")):
            self.lose("datasets.message_property_mappings", _CONVERTER, mapping or {"role": role, "content": content})
        columns = {here: about.pop("field_messages", None) or "messages"}
        columns["tools"] = about.pop("field_tools", None) or "tools"
        thought = about.pop("field_thinking", None) or "reasoning_content"
        asked = about.pop("template_thinking_key", None) or "reasoning_content"
        if thought != asked or thought not in _THOUGHTS:
            self.lose("datasets.field_thinking", _CONVERTER, thought)
        if about.get("roles_to_train") in (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]):
            about.pop("roles_to_train")
        for key in ("train_on_eos", "train_on_eot"):
            if about.get(key) == "turn":
                about.pop(key)
        roles = about.get("roles")
        if isinstance(roles, Mapping) and all(
            name in _ROLES
            for role, given in roles.items()
            for name in (role, *(given if isinstance(given, list) else [given]))
        ):
            about.pop("roles")
        columns = {field: column for field, column in columns.items() if field != column}
        return {"format": kind} | ({"field_mapping": columns} if columns else {})

    def _axolotl_preferences(self, kind: Any, about: dict[str, Any]) -> dict[str, Any]:
        """Answers to compare, or with labels. The format is detected; texts for which Axolotl has a template of its own
        become chat turns."""
        if isinstance(kind, Mapping):
            about |= kind
        chat = self._axolotl_chat(about)
        columns = chat.get("field_mapping", {}) if kind in ("chat_template", "chat_template.default") else {}
        for name in ("prompt", "system", "chosen", "rejected", "completion", "label"):
            if (column := about.pop(f"field_{name}", None)) not in (None, name):
                columns[name] = column
        return ({"format": "prompt_completion"} if kind == "passthrough" else {}) | (
            {"field_mapping": columns} if columns else {}
        )

    def _axolotl_template(self, kind: Mapping[str, Any]) -> dict[str, Any]:
        """A prompt of its own: names of columns, and how they are put together."""
        rest = dict(kind)
        columns = {name: rest.pop(f"field_{name}", None) or name for name in ("instruction", "input", "output")}
        template = str(rest.pop("format", None) or "{instruction} {input}")
        if rest.pop("no_input_format", None):
            self.note("datasets: no_input_format is ignored; data.input_template applies to all rows")
        for key, value in rest.items():
            if value not in (None, "", "{system}"):
                self.lose(f"datasets.type.{key}", _CONVERTER, value)
        template = re.sub(r"\{(instruction|input|output)\}", lambda match: f"{{{columns[match[1]]}}}", template)
        return {"input_template": template, "output_template": f"{{{columns['output']}}}"}
