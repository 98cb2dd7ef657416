"""The supervisor: starts the processes of one engine, watches them, and says why they ended."""
