"""The `enginebay` program: it finds the command, runs it, and turns errors into messages and exit
codes. Its usual commands: generate, embed, chat, plugins, explain, config, env and new.

`options` has the flags of every command that makes an engine. `show` and `rows` print tables and
progress, for the commands of enginebay_bench and enginebay_testing too.
"""
