"""A cell past one machine: its servers run in replicas of Ray Serve, which places, scales and replaces them.

    prefill, decode    a whole server each: an engine, and HTTP on the address of its node (`worker`)
    gateway            a gateway as `motet gateway` runs it, mounted into Serve's HTTP (`running`)
    directory          the list of workers: they announce themselves, and others follow it (`directory`)

Routing, migration and the transfer of KV are those of any cell. Only Ray's part is here: how replicas are made, find
each other, are chosen and counted. Modules that import `ray` are imported by name only, so everything else runs without
the extra.
"""
