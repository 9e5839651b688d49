"""The evaluation package: finds a run's model, generates answers, scores them and compares with the base model."""
