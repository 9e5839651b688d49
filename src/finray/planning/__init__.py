"""The planning package: what a run needs and its problems, determined on a CPU without Ray."""
