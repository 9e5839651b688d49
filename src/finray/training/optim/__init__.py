"""Optimizers over parameters that may be shards."""
