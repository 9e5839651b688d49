"""The publishing package: pushes a finished model to the Hub, with a model card."""
