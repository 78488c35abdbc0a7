"""Moves KV from a prefill worker to a decode worker. The modules, in the order in which a transfer uses them:

ticket           everything that a decode worker needs to fetch a trunk, sealed with the cluster key
lease            how long a prefill worker keeps the blocks, and the heartbeats of decode workers that extend this time
proof            numbers in registered memory that show a reader that it has read the blocks named in its ticket
orders           the orders of an engine core to its transfer thread, and the events that come back
thread           the transfer thread and its two queues (`mailbox`)
loop             what the thread does in each round, as the owner of leases; `reader` as the reader of trunks
peer             one other worker from which this one reads: introduction, connection, reads, loss
side_channel     the messages between workers over ZeroMQ, and the sockets at both ends
pull             one fetch of a trunk, from the order to the last byte that can arrive
transport        the interface to what moves the bytes; `backends` has NIXL and shared memory
figures          the duration of pulls, for the metrics and the log
"""
