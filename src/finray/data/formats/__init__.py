"""Formats of rows, their detection, and conversion to examples."""
