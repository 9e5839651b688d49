"""The tracking room: one sink per file, behind the protocol in ``base``."""
