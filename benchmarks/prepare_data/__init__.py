"""The parts of the preparation benchmark, `benchmarks/prepare.py`."""
