"""The HTTP process: OpenAI-shaped routes over an engine client, a tokenizer and a chat template."""
