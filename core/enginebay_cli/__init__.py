"""The usual commands of the `enginebay` program: generate, chat, plugins, explain, config, env and
new.

`show` and `rows` print tables and progress, for the commands of enginebay_bench and
enginebay_testing too.
"""
