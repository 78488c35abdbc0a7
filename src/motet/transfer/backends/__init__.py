"""The implementations of `Transport` between processes, and the choice between them (`start`):

nixl               NIXL over UCX: between machines, and on one machine. Its packages exist for Linux only
shared_memory      between processes of one user on one machine, on every system
shared_connection  the two ends of a connection of `shared_memory`
shared_segment     the memory that both ends share
"""
