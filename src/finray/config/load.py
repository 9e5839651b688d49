"""From a YAML file and ``section.field=value`` overrides to a :class:`Config`, or to all of its problems at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from finray.config.schema import Config, SourceConfig, sections
from finray.errors import ConfigError

PRESET_KEY = "preset"
# Fields of the data section that say how one source is read: with another source, a preset's are not meant.
_OF_ITS_SOURCE = frozenset(
    "source mix subset revision train_split eval_source eval_split test_split group_by "  # noqa: SIM905
    "format field_mapping input_template output_template converter".split()
)


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; here that is an error."""


def _construct_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            mark = key_node.start_mark
            raise ConfigError(
                f"the key `{key}` stands twice", where=f"{mark.name}:{mark.line + 1}", repair="keep one of the two"
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def load_config(path: str | Path | None, overrides: Iterable[str] = ()) -> Config:
    """Read a config file and apply overrides.

    Args:
        path: a YAML file, or None to build from overrides alone.
        overrides: strings of the form ``train.max_steps=100``; values are YAML.

    Raises:
        ConfigError: with every problem found, each with its dotted path.
    """
    raw = read_yaml(Path(path)) if path is not None else {}
    problems: list[str] = []
    for override in overrides:
        problem = _apply_override(raw, override)
        if problem:
            problems.append(problem)
    return build_config(raw, source=str(path) if path is not None else "command line", problems=problems)


def build_config(raw: Mapping[str, Any], *, source: str, problems: Iterable[str] = ()) -> Config:
    """Validate plain data; ``problems`` found earlier are reported together with the new ones."""
    found = list(problems)
    # `train:` with nothing but comments below it is null in YAML, and means all defaults.
    data = {key: value for key, value in raw.items() if value is not None or key not in sections()}
    preset = data.pop(PRESET_KEY, None)
    if preset is not None:
        data = merge(_for_own_data(read_preset(str(preset)), data), data)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        found += _describe_all(error.errors())
    if found:
        count = f"{len(found)} problem{'s' if len(found) > 1 else ''}"
        raise ConfigError(f"{count} in the configuration", where=source, problems=tuple(found))
    return config


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; duplicate keys and syntax errors are named with their line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            "the config file does not exist", where=str(path), repair="`finray init` writes a starter file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file cannot be read: {error}", where=str(path)) from None
    loader = _UniqueKeyLoader(text)
    loader.name = str(path)
    try:
        data = loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError(f"not valid YAML: {getattr(error, 'problem', error)}", where=where) from None
    finally:
        loader.dispose()
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError("the file must hold sections such as `model:` and `data:`", where=str(path))
    return data


def preset_names() -> list[str]:
    """Names of the shipped presets."""
    folder = resources.files("finray.config") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def preset_text(name: str) -> str:
    """The YAML text of a preset, comments included."""
    if name not in preset_names():
        raise ConfigError(
            f"no preset is called `{name}`{_suggest(name, preset_names())}",
            where=PRESET_KEY,
            repair=f"use one of: {', '.join(preset_names())}",
        )
    return (resources.files("finray.config") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")


def read_preset(name: str) -> dict[str, Any]:
    """A preset as plain data."""
    data: dict[str, Any] = yaml.safe_load(preset_text(name))
    return data


def _for_own_data(preset: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A preset without what it says of its source, where a configuration names a source of its own."""
    section = own.get("data")
    if not isinstance(section, Mapping) or not {"source", "mix"} & set(section):
        return preset
    kept = {name: value for name, value in preset["data"].items() if name not in _OF_ITS_SOURCE}
    return {**preset, "data": kept}


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Two configurations as one; ``over`` wins, sections are merged field by field."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _apply_override(raw: dict[str, Any], override: str) -> str | None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return f"`{override}` is not an override: write section.field=value"
    if len(keys) == 1 and keys[0] != PRESET_KEY:
        return f"`{override}` names no field: write section.field=value{_suggest_owner(keys[0])}"
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return f"{path}: `{text}` is not a YAML value"
    target = raw
    for key in keys[:-1]:
        nested = target.get(key)
        if not isinstance(nested, dict):
            nested = {}
            target[key] = nested
        target = nested
    target[keys[-1]] = value
    return None


def _owners() -> dict[str, str]:
    """Field name to dotted path, for fields that only one section has."""
    owners: dict[str, list[str]] = {}
    for section, model in sections().items():
        for field in model.model_fields:
            owners.setdefault(field, []).append(f"{section}.{field}")
    return {field: paths[0] for field, paths in owners.items() if len(paths) == 1}


def _suggest(name: str, known: Iterable[str], shown: Mapping[str, str] | None = None) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean `{shown[close[0]] if shown else close[0]}`?)" if close else ""


def _suggest_owner(name: str) -> str:
    owners = _owners()
    return _suggest(name, owners, owners)


def _describe_all(items: Iterable[Any]) -> list[str]:
    """One line a field: the branches of a union each fail for themselves, and are joined by "or"."""
    reasons: dict[str, list[str]] = {}
    for item in items:
        path, reason = _describe(item)
        if reason not in reasons.setdefault(path, []):
            reasons[path].append(reason)
    return [f"{path}: {', or '.join(found)}" if path else ", or ".join(found) for path, found in reasons.items()]


def _describe(item: Any) -> tuple[str, str]:
    """One problem of pydantic's as dotted path and reason, with a suggestion for a key that does not exist."""
    location = [
        str(part) for part in item["loc"] if not str(part).startswith(("literal[", "list[", "bool", "function-"))
    ]
    # Members of a union carry the name of the branch that failed; the field's path is what the user wrote.
    in_list = len(location) > 3 and location[2].isdigit()
    path = ".".join(location if in_list or not location or location[0] not in sections() else location[:2])
    kind = item["type"]
    if kind == "extra_forbidden":
        return path, f"unknown key{_suggest_key(location)}"
    if kind == "missing":
        section = sections().get(location[0]) if location else None
        field = section.model_fields.get(location[1]) if section is not None and len(location) > 1 else None
        return path, f"missing{f' ({field.description})' if field is not None else ''}"
    reason = str(item["msg"]).removeprefix("Value error, ")
    if kind in ("model_type", "dict_type"):
        return path, f"must be a section with fields, got {item['input']!r}"
    if kind == "value_error":
        # A rule over several fields of a section names the field itself.
        named = reason.split(":")[0] if reason.startswith(f"{path}.") and ": " in reason else None
        return (named, reason.removeprefix(f"{named}: ")) if named else (path, reason)
    return path, f"{reason[0].lower()}{reason[1:]}, got {item['input']!r}"


def _suggest_key(location: list[str]) -> str:
    known = sections()
    if location[:2] == ["data", "mix"]:
        return _suggest(location[-1], SourceConfig.model_fields)
    if len(location) == 1:
        return _suggest(location[0], known) or _suggest_owner(location[0])
    section, key = location[0], location[-1]
    if section in known:
        near = _suggest(key, known[section].model_fields)
        if near:
            return near
    return _suggest_owner(key)
