"""The command line: thin commands, one table entry each."""
