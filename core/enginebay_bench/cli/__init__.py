"""The commands bench, tune and eval."""
