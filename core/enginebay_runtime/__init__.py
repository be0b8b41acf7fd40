"""From the plan of a step to its compiled program: what the engines of this project stand on.

`engine` has StepEngine, which turns plans into commands: `geometry` and `buckets` the sizes of its
steps, `rows` the table of its rows, `assemble` the commands. `local` runs commands on the devices
of this process: `runner` launches steps; `step`, `prefill` and `verify` are pure step functions,
`device` is the state of the rows. An engine of another plugin may do without all of it.
"""
