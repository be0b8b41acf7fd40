"""What the documented APIs share: opening a model, tokenizers and their special tokens, and values
stored as JSON.
"""
