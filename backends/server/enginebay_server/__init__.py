"""The HTTP server: `enginebay serve` answers OpenAI's API over any engine."""
