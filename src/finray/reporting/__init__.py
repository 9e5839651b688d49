"""The reporting package: displays of results, and HTML pages with interactive plots."""
