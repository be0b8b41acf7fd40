"""How the built-in ops are checked: their axes, the checks of a case, and programs to compile."""
