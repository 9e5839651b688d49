"""The model package: loading, adapters, quantization, packed rows and their attention, export."""
