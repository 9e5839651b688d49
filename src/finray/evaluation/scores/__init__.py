"""Scores by name: what an answer is worth. One small protocol (``base.py``), a few scores a file."""
