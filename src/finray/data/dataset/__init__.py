"""The prepared dataset: planning, writing, the manifest, reading by index."""
