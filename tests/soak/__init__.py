"""Minutes of a real server under clients of every kind: `python -m tests.soak --minutes 10`, or `make soak`."""
