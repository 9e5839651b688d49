"""DeepSpeed's ZeRO stages: its configuration, the strategy, and where it keeps state."""
