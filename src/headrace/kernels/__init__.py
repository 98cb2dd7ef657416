"""Kernels: each file holds the operation's PyTorch reference and, where there is one, the fast form with its checks."""
