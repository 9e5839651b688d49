"""The inspection room: what is in the data, and which tokens are trained on."""
