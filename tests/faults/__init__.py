"""Faults put into a real service, and what becomes of it: `python -m tests.faults`, or `make faults`."""
