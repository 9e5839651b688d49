"""What the benchmarks share: rows, subprocesses, statistics and the results file."""
