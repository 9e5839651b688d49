"""The reporting room: pages and plots that a person opens."""
