"""Checkpoints: where they come from, how they are read, and how their tensors find the modules of this rank."""
