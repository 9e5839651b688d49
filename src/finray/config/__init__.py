"""The configuration room: schema, loading with every problem at once, run identity, redaction, reference."""

from finray.config.identity import differences
from finray.config.load import build_config, load_config, preset_names, preset_text
from finray.config.redact import redact, redact_text
from finray.config.schema import Config

__all__ = [
    "Config",
    "build_config",
    "differences",
    "load_config",
    "preset_names",
    "preset_text",
    "redact",
    "redact_text",
]
