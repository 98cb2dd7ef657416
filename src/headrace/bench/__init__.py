"""`headrace bench`: measure any OpenAI-compatible server. Torch-free, and light enough to share the server's cores."""
