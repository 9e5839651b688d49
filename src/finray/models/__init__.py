"""The model room: loading, adapters, attention for packed rows, tasks, export."""
