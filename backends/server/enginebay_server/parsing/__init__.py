"""Parsers that find reasoning and tool calls in text while it is generated."""
