"""The inspection room: what is in the data, and what of it is learned."""
