"""The commands bench, compare, tune and eval."""
