"""A worker: one rank's process. It obeys plans, in order, and meets the engine only through `headrace.step`."""
