"""Scores of answers, by name. One small protocol (``base.py``), a few scores per file."""
