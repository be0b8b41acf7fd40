"""Parsers of generated text: reasoning and tool calls, found while the text is generated."""
