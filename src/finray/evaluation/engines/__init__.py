"""Engines that generate, one per file."""
