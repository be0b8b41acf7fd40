"""Checkpoints in GGUF, the file format of llama.cpp, with configuration, tokenizer and weights."""
