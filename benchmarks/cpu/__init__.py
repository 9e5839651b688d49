"""The measurements of train_cpu.py, one to a module."""
