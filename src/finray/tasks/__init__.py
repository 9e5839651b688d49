"""The tasks: one file each, behind the protocol in training."""
