"""The training package: step, loop, loss normalisation, optimizer, schedule, state. Does not depend on Ray."""
