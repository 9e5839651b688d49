"""The training room: the step, the loop, loss normalisation, optimizer, schedule, state. It knows nothing of Ray."""
