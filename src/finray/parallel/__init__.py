"""The strategy room: one strategy per file, behind the protocol in ``base``."""
