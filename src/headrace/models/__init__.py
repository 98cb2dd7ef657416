"""Models: a file each, a line each in the registry."""
