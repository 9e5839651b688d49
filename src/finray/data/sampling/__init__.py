"""Which rows a step sees: splits, packs, the order, and batches."""
