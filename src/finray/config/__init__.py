"""The configuration: its schema, loading and overrides, identity of runs, redaction, and the generated reference."""

# Where runs are unless `run.output_dir` says otherwise; it is not there before the first run.
RUNS = "runs"
