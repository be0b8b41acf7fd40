"""The compiled step that every engine uses: buckets, donation, N-step decode, warm-up.

`device` holds the rows' state on the device, `buckets` the few shapes that steps come in, `step`
the pure step functions, `runner` the launcher, `sharding` how logical axes reach the mesh.
"""
