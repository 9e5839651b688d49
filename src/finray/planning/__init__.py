"""The planning room: what a run needs and what is wrong with it, found on a CPU without Ray."""
