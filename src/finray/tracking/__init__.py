"""The tracking package: one sink per file, behind the protocol in ``base``."""
