"""The measurements of gpu.py, one to a module."""
