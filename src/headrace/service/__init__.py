"""`headrace service`: an engine as a unit of systemd. Torch-free."""
