"""From a file, preset or mapping and overrides of it to a :class:`Config`, or to all of its problems at once."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import ValidationError

from finray.config import replicas, trust
from finray.config.names import NAMES, asks_nothing, called_here, system_of, value_here
from finray.config.schema import Config, Section, SourceConfig, section_of, sections
from finray.errors import ConfigError, did_you_mean, did_you_mean_path
from finray.files import opened
from finray.limits import cut, read_named, shown

PRESET_KEY = "preset"
# The config of a command, or of a call, that names none.
DEFAULT_FILE = "finray.yaml"
# The copy that a run directory keeps.
_RUNS_CONFIG = "config.yaml"
# Not `.json`, which YAML includes.
_DATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".arrow", ".feather")
# The field that a mapping gives where it gives a section a name instead of fields.
_NAMED_BY = {"model": "name", "data": "source", "adapter": "method", "run": "name"}
# How like a field of another section a name must be: below this, suggestions mislead (`stage`: `parallel.zero_stage`).
_ALIKE = 0.75
# What a configuration is made of.
ConfigLike = Config | Mapping[str, Any] | str | Path | None
Overrides = Iterable[str] | Mapping[str, Any]
# Fields that describe one particular source: a configuration that names its own source does not inherit them.
_SOURCE_FIELDS = frozenset(SourceConfig.model_fields).union(
    ("mix", "train_split", "eval_source", "eval_split", "test_split", "group_by", "converter")
)


# A config is a page or two. Anything larger is not a config, or is meant to exhaust memory.
_MAX_BYTES = 1_000_000
_NO_SECTIONS = "the file must consist of sections such as `model:` and `data:`"
_MAX_VALUES = 100_000
_MAX_DEPTH = 50
# Larger numbers are no floats, and Python does not print them.
_MAX_BITS = 512
# A whole file of another system is told key by key.
_MAX_PROBLEMS = 60
# Characters from which on libyaml's scanner is worth its own messages.
_LARGE = 50_000


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with limits on depth, on numbers and on the expansion of aliases.

    PyYAML silently keeps the last of two equal keys; here a duplicate key is an error.
    """

    _depth = 0

    def __init__(self, text: str, name: str) -> None:
        if is_large := len(text) > _LARGE and yaml.__with_libyaml__:
            events = yaml.CSafeLoader(text)
            vars(self).update({name: getattr(events, name) for name in ("check_event", "get_event", "peek_event")})
        super().__init__("" if is_large else text)
        self.name = name

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value: int = super().construct_yaml_int(node)
        if value.bit_length() > _MAX_BITS:
            raise yaml.MarkedYAMLError(problem="a number is too large", problem_mark=node.start_mark)
        return value

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"more than {_MAX_DEPTH} levels",
                problem_mark=self.peek_event().start_mark,  # type: ignore[no-untyped-call]
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            self._require_bounded(node, {})
        return node

    def _require_bounded(self, node: yaml.Node, sizes: dict[int, int]) -> int:
        """Number of values under a node, an alias counted as what it stands for; 0 marks one that is being counted."""
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) in sizes:
            if not sizes[id(node)]:
                raise yaml.MarkedYAMLError(
                    problem="an alias refers to a value that contains it", problem_mark=node.start_mark
                )
            return sizes[id(node)]
        sizes[id(node)] = 0
        if isinstance(node, yaml.MappingNode):
            self._require_names(node)
        inside = node.value if isinstance(node, yaml.SequenceNode) else [child for pair in node.value for child in pair]
        total = 1 + sum(self._require_bounded(child, sizes) for child in inside)
        if total > _MAX_VALUES:
            raise yaml.MarkedYAMLError(
                problem=f"its aliases expand to more than {_MAX_VALUES:,} values", problem_mark=node.start_mark
            )
        sizes[id(node)] = total
        return total

    def _require_names(self, node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key, _ in node.value:
            mark = key.start_mark
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem="a key must be a name; text with braces needs quotes, as in `'{{ MODEL }}'`",
                    problem_mark=mark,
                )
            if key.value in seen:
                raise ConfigError(
                    f"duplicate key `{cut(key.value)}`",
                    where=f"{self.name}:{mark.line + 1}",
                    repair="keep one of them",
                )
            seen.add(key.value)

    def get_lines(self) -> tuple[dict[str, Any], dict[str, int]] | None:
        """The values of a mapping and the lines that they are on, from 1, by the keys as they are written; None where
        there is no mapping."""
        node = self.get_single_node()
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            return None
        self.flatten_mapping(node)
        values = {key.value: self.construct_object(value, deep=True) for key, value in node.value}
        return values, {key.value: key.start_mark.line + 1 for key, _ in node.value}


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse_yaml(text: str, *, name: str) -> Any:
    """The value of a YAML text, within limits of size.

    Args:
        text: a document.
        name: of the file, in messages.

    Raises:
        ConfigError: it is not YAML, has a duplicate key, or is too large or too deep.
    """
    return _parsed(text, name, _Loader.get_single_data)


def _parsed(text: str, name: str, read: Callable[[_Loader], Any]) -> Any:
    mark = None
    try:
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it has {len(text):,} characters; the limit is {_MAX_BYTES:,}")
        loader = _Loader(text, name)
        try:
            return read(loader)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark, reason = getattr(error, "problem_mark", None), str(getattr(error, "problem", None) or error)
        if reason.startswith("but "):
            reason = f"{getattr(error, 'context', '')}, {reason}"
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        # PyYAML reads 2024-99-99 as a date, `1_` as a number, and fails as Python does.
        reason = str(error)
    raise ConfigError(
        f"not valid YAML: {cut(' '.join(reason.split()))}",
        where=name if mark is None else f"{name}:{mark.line + 1}",
        repair="indent with spaces instead of tabs" if "'\\t'" in reason else None,
    )


def load_config(config: ConfigLike = None, overrides: Overrides = (), **changed: Any) -> Config:
    """The configuration that a file, a preset, a mapping or another configuration gives, with overrides applied.

    Args:
        config: a YAML file, the name of a preset (:func:`preset_names`), a mapping of sections, or a :class:`Config`.
            None builds it from what follows alone; where nothing follows, it is ``finray.yaml`` in this directory.
        overrides: strings ``section.field=value`` (values are YAML), or a mapping: ``{"train.max_steps": 4}`` and
            ``{"train": {"max_steps": 4}}`` set the same field. A number reaches into a list: ``data.mix.0.weight``.
        changed: overrides as keywords, ``train={"max_steps": 4}``. Here and in mappings a name alone is enough for
            ``model``, ``run``, ``adapter`` (its method) and ``data`` (its source).

    Raises:
        ConfigError: with every problem found, each with its dotted path.
    """
    texts = [overrides] if isinstance(overrides, str) else [] if isinstance(overrides, Mapping) else list(overrides)
    # Keywords of the function that was called, of which it has none of this name.
    odd = [name for name in changed if name.partition(".")[0] not in (*sections(), PRESET_KEY)]
    problems = [
        f"`{name}` is no option of this function and no section of a config"
        + (suggest_owner(name, changed.pop(name)) or did_you_mean(name, sections()))
        for name in odd
    ]
    values = [mapping for mapping in (overrides, changed) if mapping and isinstance(mapping, Mapping)]
    if config is None and not texts and not values and not problems:
        config = DEFAULT_FILE
    source, raw = "overrides" if config is None else "config", {}
    if isinstance(config, Config):
        # Only what was set: which fields are left at their defaults matters when an adapter is continued.
        raw = config.model_dump(mode="json", exclude_unset=True)
    elif isinstance(config, Mapping):
        values.insert(0, config)
    elif isinstance(config, str | PurePath):
        source = str(config)
        raw = {PRESET_KEY: source} if is_preset(source) else read_yaml(Path(source).expanduser())
        if (system := system_of(raw)) and not any(isinstance(raw.get(name), Mapping) for name in sections()):
            raise ConfigError(
                f"this is a config of {system}",
                where=source,
                repair=f"`finray convert {source} -o my-run.yaml` writes one for finray, and lists what is not carried "
                "over",
            )
    elif config is not None:
        kind = type(config).__name__
        raise ConfigError(
            f"a {kind} is not a config",
            where="config",
            repair="pass a YAML file, a preset name or a mapping of sections; pass rows as data=...",
        )
    for mapping in values:
        for path, value in mapping.items():
            problems += _set(raw, str(path), value)
    notes: list[str] = []
    if not isinstance(config, Config):
        raw, notes = replicas.from_replicas(raw, given=[text.partition("=")[0].strip() for text in texts])
    built = build_config(raw, overrides=texts, source=source, problems=problems)
    built = built.with_notes(config.notes if isinstance(config, Config) else notes)
    said = [*(text.partition("=")[0].strip() for text in texts), *_paths(values)]
    if isinstance(config, Config) and config.foreign[0]:
        where, before = config.foreign
        return trust.of_stranger(built.with_foreign(where, before), where, said=said)
    file = Path(source).expanduser()
    if isinstance(config, str | PurePath) and trust.is_in_run(file) and not trust.is_trusted(file.parent):
        return trust.of_stranger(built, str(file), said=said)
    return built


def _paths(values: Iterable[Mapping[str, Any]], prefix: str = "") -> Iterator[str]:
    """The dotted paths of the fields that mappings set."""
    for mapping in values:
        for name, value in mapping.items():
            yield from _paths([value], f"{prefix}{name}.") if isinstance(value, Mapping) else [f"{prefix}{name}"]


def is_preset(name: str) -> bool:
    """Whether a config of this name is a preset: a file of the same name comes first."""
    return name in preset_names() and not Path(name).exists()


def build_config(
    raw: Mapping[str, Any], *, source: str, overrides: Iterable[str] = (), problems: Iterable[str] = ()
) -> Config:
    """Validate the content of a config file, which may name a preset.

    Args:
        raw: the content.
        source: its name in messages.
        overrides: applied to it: strings as for :func:`load_config`.
        problems: found before, and told with those that are found here.

    Raises:
        ConfigError: with every problem found, each with its dotted path.
    """
    data = copy.deepcopy(dict(raw))
    all_problems = [*problems, *(problem for override in overrides for problem in _apply_override(data, override))]
    # `train:` with nothing but comments below it is null in YAML, and means all defaults.
    data = {key: value for key, value in data.items() if value is not None or key not in sections()}
    name = data.pop(PRESET_KEY, None)
    if name is not None:
        preset = read_preset(str(name))
        section = data.get("data")
        if isinstance(section, Mapping) and not section.keys().isdisjoint({"source", "mix"}):
            preset["data"] = {key: value for key, value in preset["data"].items() if key not in _SOURCE_FIELDS}
            # Nor is there anything to evaluate, unless the config names it.
            if {*preset["data"], *section}.isdisjoint({"eval_ratio", "eval_source", "eval_split"}):
                preset.pop("evaluation", None)
        data = _over(preset, data)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        all_problems += _problems(error)
    if all_problems:
        count = f"{len(all_problems)} problem{'s' if len(all_problems) > 1 else ''}"
        more = len(all_problems) - _MAX_PROBLEMS
        listed = [cut(problem, 1000) for problem in all_problems[:_MAX_PROBLEMS]]
        listed += [f"and {more} more"] if more > 0 else []
        raise ConfigError(f"{count} in the configuration", where=source, problems=tuple(listed))
    return config


def _over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's settings, overridden by those of a config; sections are merged."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = _over(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_yaml(path: Path, root: Path | None = None) -> dict[str, Any]:
    """Read a YAML mapping, a file that lies in ``root`` (None: the user names it); duplicate keys and syntax errors are
    reported with their line."""
    data = parse_yaml(_text_of(path, root=root), name=str(path))
    if data is not None and not isinstance(data, dict):
        raise ConfigError(_NO_SECTIONS, where=str(path))
    return data or {}


def read_yaml_lines(path: Path, *, repair: str) -> tuple[dict[str, Any], dict[str, int]]:
    """As :func:`read_yaml`, with the keys as written and the line of each; ``repair`` is said where there is no
    file."""
    text = _text_of(path, repair=repair)
    document: tuple[dict[str, Any], dict[str, int]] | None = _parsed(text, str(path), _Loader.get_lines)
    if document is None:
        raise ConfigError(_NO_SECTIONS, where=str(path))
    return document


def _text_of(
    path: Path,
    repair: str = "`finray init` writes a starter file; `finray config presets` lists the presets",
    root: Path | None = None,
) -> str:
    if path.suffix in _DATA_SUFFIXES and path.is_file():
        raise ConfigError(
            "this is a file of data, not a config",
            where=str(path),
            repair=f"`finray init my-run.yaml --data {path}` writes a config for it",
        )
    try:
        if root is None:
            content = read_named(path, _MAX_BYTES + 1)
        else:
            with opened(path, root) as stream:
                content = stream.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            # Cut off, it could be another config.
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes, which is the limit")
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        near = did_you_mean_path(path, "*.yaml", "*.yml") or did_you_mean(str(path), preset_names())
        raise ConfigError(
            f"the file does not exist{near}",
            where=str(path),
            repair=repair,
        ) from None
    except (OSError, ValueError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else error
        if path.is_dir():
            kind, repair = "this is a directory", "give a YAML file"
            if (path / _RUNS_CONFIG).is_file():
                kind = "this is the directory of a run"
                repair = f"give the config that it was started with, or its copy {path / _RUNS_CONFIG}"
            elif (path / "config.json").is_file():
                kind = "this is the directory of a model"
                repair = f"`finray init my-run.yaml --model {path}` writes a config for it"
            raise ConfigError(f"{kind}, not a config file", where=str(path), repair=repair) from None
        raise ConfigError(
            f"the config file cannot be read: {reason}", where=str(path), repair="give a small YAML file in UTF-8"
        ) from None


def preset_names() -> list[str]:
    """Names of the presets that come with finray."""
    folder = resources.files("finray.config") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def preset_text(name: str) -> str:
    """The YAML text of a preset, comments included."""
    if name not in preset_names():
        raise ConfigError(
            f"there is no preset `{name}`{did_you_mean(name, preset_names())}",
            where=PRESET_KEY,
            repair=f"use one of: {', '.join(preset_names())}",
        )
    return (resources.files("finray.config") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")


def read_preset(name: str) -> dict[str, Any]:
    """A preset as plain data."""
    data: dict[str, Any] = yaml.safe_load(preset_text(name))
    return data


def _apply_override(data: dict[str, Any], override: str) -> list[str]:
    """Sets one field in place; returns the problems of the override."""
    path, equals, text = override.partition("=")
    if not equals:
        return [f"`{override}` is not an override: write section.field=value, without spaces"]
    if "." not in path and path.strip() != PRESET_KEY:
        return [f"`{override}` names no section: write section.field=value{suggest_owner(path.strip(), text.strip())}"]
    section, _, name = path.strip().partition(".")
    field = sections()[section].model_fields.get(name) if section in sections() else None
    # Templates and instructions such as `{answer}` and `Answer: {answer}` are no YAML that anybody means.
    is_text = field is not None and field.annotation in (str, str | None)
    if is_text and "\n" in text.strip() and not re.match(r"\s*[\"'|>]", text):
        # YAML would join the lines.
        return _set(data, path, text)
    try:
        value = parse_yaml(text, name=path)
    except ConfigError as error:
        if not is_text:
            return [f"{cut(path)}: `{cut(text)}` is no value: {error.message}"]
        value = text.strip()
    if is_text and isinstance(value, Mapping):
        value = text.strip()
    if (value is None or isinstance(value, str)) and re.match(r"(?!\s*[\"'])(.*\s)?#", text):
        # YAML takes the rest for a comment, which nobody writes on a command line.
        value = text.strip()
    return _set(data, path, value)


def _set(data: dict[str, Any], path: str, value: Any) -> list[str]:
    """Sets a field by dotted path in place, or the fields of a section; returns the problems."""
    path = path.strip()
    keys = path.split(".")
    if not all(keys):
        return [f"`{path}` is not a field: write section.field"]
    if path in sections():
        if isinstance(value, Mapping):
            data[path] = data.get(path) or {}
            return [problem for field, item in value.items() for problem in _set(data, f"{path}.{field}", item)]
        if path in _NAMED_BY and value is not None:
            keys.append(_NAMED_BY[path])
    target: Any = data
    for number, key in enumerate(keys):
        if isinstance(target, list):
            if not key.isdecimal() or int(key) >= len(target):
                return [f"{path}: `{'.'.join(keys[:number])}` is a list of {len(target)}; count its items from 0"]
            at: Any = int(key)
        else:
            at = key
        if number == len(keys) - 1:
            target[at] = _plain(value)
        else:
            nested = target[at] if isinstance(target, list) else target.get(at)
            if not isinstance(nested, dict | list):
                nested = target[at] = {}
            target = nested
    return []


def _plain(value: Any) -> Any:
    """Paths as the strings that a file would hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _problems(error: ValidationError) -> list[str]:
    """One line per field, with its dotted path and a suggestion for an unknown key."""
    reasons: dict[str, list[str]] = {}
    nothing: list[str] = []
    for item in error.errors():
        # Pydantic's location also names the branch of a union that failed; a user wrote only the fields in it.
        kind: type[Section] = Config
        keys: list[str] = []
        field = None
        for part in item["loc"]:
            field = kind.model_fields.get(str(part))
            if field is not None:
                kind = section_of(field.annotation) or Section
            if field is not None or isinstance(part, int):
                keys.append(str(part))
        path, reason = ".".join(keys), str(item["msg"]).removeprefix("Value error, ")
        match item["type"]:
            case "extra_forbidden":
                key = str(item["loc"][-1])
                path = ".".join([*keys, key])
                hint = called_here(key, item["input"])
                # Looking for likenesses takes a millisecond, and a file may have thousands of keys.
                if not hint and len(reasons) < _MAX_PROBLEMS:
                    hint = did_you_mean(key, kind.model_fields, cutoff=_ALIKE) or suggest_owner(key)
                if asks_nothing(key, item["input"]) and (key in NAMES or not hint):
                    nothing.append(path)
                    continue
                reason = f"unknown key{hint}"
            case "missing":
                reason = f"missing ({field.description})" if field is not None and len(keys) > 1 else "missing"
            case "model_type" | "dict_type":
                hint = f" (did you mean `{path}.{_NAMED_BY[path]}`?)" if path in _NAMED_BY else ""
                reason = f"must be a section with fields; got {shown(item['input'])}{hint}"
            case "value_error":
                # A rule over several fields names the field itself.
                path = "" if reason.startswith(f"{path}.") else path
            case _:
                reason = f"{reason[0].lower()}{reason[1:]}, got {shown(item['input'])}{_suggest_value(path, item)}"
        if reason not in reasons.setdefault(path, []):
            reasons[path].append(reason)
    # The branches of a union fail one by one.
    problems = [f"{path}: {', or '.join(each)}" if path else ", or ".join(each) for path, each in reasons.items()]
    return problems + ([f"unknown keys without effect, which can be removed: {', '.join(nothing)}"] if nothing else [])


def _suggest_value(path: str, item: Mapping[str, Any]) -> str:
    """A hint what to write instead of a value that a field refuses; empty if unknown."""
    value = item["input"]
    match item["type"]:
        case "literal_error":
            return value_here(value, re.findall(r"'([^']+)'", item["ctx"]["expected"]))
        case "greater_than" if value == 0 and path == "train.max_grad_norm":
            return " (null clips nothing)"
        case "list_type" if isinstance(value, str):
            return f" (write [{value}])"
        case "string_type" if isinstance(value, list) and path == "data.source":
            return " (several sources are `data.mix: [{source: ...}, {source: ...}]`)"
    return ""


def suggest_owner(name: str, value: object = None) -> str:
    """A suggestion of ``section.field`` for another system's name, or the name of a field that only one section has."""
    if hint := called_here(name, value):
        return hint
    fields = [(field, f"{section}.{field}") for section, model in sections().items() for field in model.model_fields]
    names = [field for field, _ in fields]
    close = difflib.get_close_matches(name, [field for field in names if names.count(field) == 1], n=1, cutoff=_ALIKE)
    return f" (did you mean `{dict(fields)[close[0]]}`?)" if close else ""
