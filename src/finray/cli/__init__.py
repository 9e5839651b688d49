"""The command line: thin; parse, call the API, print."""
