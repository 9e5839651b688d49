"""The configuration: its schema, loading and overrides, identity of runs, redaction, and the generated reference."""
