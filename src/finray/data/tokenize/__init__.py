"""From examples to token ids and loss masks."""
