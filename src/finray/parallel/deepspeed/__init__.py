"""DeepSpeed's ZeRO stages: configuration, strategy, and access to its state."""
