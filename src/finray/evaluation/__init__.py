"""The evaluation room: generation back ends, metrics. It knows nothing of training."""
