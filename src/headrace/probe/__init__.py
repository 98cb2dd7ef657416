"""What this machine reaches, measured: every value in a process of its own that has a deadline."""
