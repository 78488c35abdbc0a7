"""A cell on several machines: its servers run in replicas of Ray Serve, which places, scales and replaces them.

    prefill, decode    a complete server each: an engine, and HTTP on the address of its node (`worker`)
    gateway            a gateway as `motet gateway` runs it, mounted into Serve's HTTP (`running_server`)
    directory          the list of workers: workers announce themselves, and other replicas follow it (`directory`)

Routing, migration and the transfer of KV work as in any cell. This folder contains only what is special on Ray: how
replicas are made, find each other, are chosen and scaled. Only `app`, `deployments`, `foreground` and `request_router`
import Ray; the other modules work without the extra.
"""
