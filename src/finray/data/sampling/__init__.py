"""Splits, packs, data order, and batches."""
