"""The training package: step, loop, loss normalization, optimizer, schedule, state. Does not depend on Ray."""
