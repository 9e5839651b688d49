"""Pages that a person opens in a browser: their shell, and plots that can be zoomed and read off."""
