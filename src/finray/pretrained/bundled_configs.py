"""Bundled configs of the presets' models, for plans without access to the Hub."""

from __future__ import annotations

from pathlib import Path

from finray.config.schema import ModelConfig

_FOLDER = Path(__file__).parent / "shapes"


def bundled_names() -> list[str]:
    """Hub ids of the models whose shape is bundled with finray."""
    return sorted(entry.name.replace("--", "/", 1) for entry in _FOLDER.iterdir() if (entry / "config.json").is_file())


def bundled_config(model: ModelConfig) -> ModelConfig | None:
    """The same model section with the bundled configuration in the place of the Hub's; None where there is none.

    There are no weights and no tokenizer beside it.
    """
    if model.name not in bundled_names() or model.revision is not None:
        return None
    return model.model_copy(update={"name": str(_FOLDER / model.name.replace("/", "--"))})
