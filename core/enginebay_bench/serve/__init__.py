"""Load on an OpenAI-compatible server, and what its clients measure.

`prompts` makes the requests, `arrivals` decides when each is sent, `client` sends it, and `sse`
reads its answer into a `timeline`. `figures` are computed from timelines, `bounds` judge them, and
`find_rate` searches the highest rate within bounds. `files`, `report` and `plots` write the
results. The command is `enginebay bench serve`.
"""
