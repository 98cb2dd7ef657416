"""The engine: one process that decides, clients that ask it, workers that obey it."""
