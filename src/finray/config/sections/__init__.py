"""The sections of a configuration: one small frozen model each, every field with a default, a reason and a line."""
