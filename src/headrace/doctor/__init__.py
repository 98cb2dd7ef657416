"""`headrace doctor`: names known causes in a log or a folder of diagnostics, and what to do about them. Torch-free."""
