"""`headrace wait`: tell when an OpenAI-compatible engine, any of them, is ready, and why it is not. Torch-free."""
