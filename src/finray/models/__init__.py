"""The model package: loading, adapters, attention for packed rows, tasks, export."""
