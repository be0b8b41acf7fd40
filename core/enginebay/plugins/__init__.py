"""The plugin host: `hooks` is the whole plugin interface on one page, `registry` finds plugins and
loads parts by name, `guard` isolates the code of a plugin while it is imported, and `blame` finds
the plugin that an error comes from.
"""
