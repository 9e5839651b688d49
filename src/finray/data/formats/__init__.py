"""What a row means: formats, their detection, and conversion to examples."""
