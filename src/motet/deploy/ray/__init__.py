"""A cell past one machine: its servers run in replicas of Ray Serve, which places, scales and replaces them.

    prefill, decode    a whole server each: an engine, and HTTP on the address of its node (`worker`)
    gateway            the gateway of `deploy.gateway_server`, mounted into Serve's HTTP (`ingress`)
    directory          where workers say that they are there, and others learn it (`directory`)

Routing, migration and the transfer of KV are those of any cell; here is only what is Ray's: how replicas are made, find
each other, are chosen and counted. Modules that import `ray` are imported by name only: everything else runs without
the extra.
"""
