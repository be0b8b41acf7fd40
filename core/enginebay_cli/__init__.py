"""The `enginebay` program: finds the command, runs it, and turns errors into messages and exit
codes. Its own commands are generate, embed, chat, plugins, explain, config, env and new.

Module `options` has the flags that every command with an engine shares. `show` and `rows` print
tables and progress; the commands of enginebay_bench and enginebay_testing use both modules too.
"""
