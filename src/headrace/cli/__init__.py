"""The command line: parse, make a configuration, call; nothing else."""
