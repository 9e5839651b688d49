"""What is learned: one file per objective, each a function of a forward pass's outputs and of its rows' values."""
