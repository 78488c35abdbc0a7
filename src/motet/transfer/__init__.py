"""Moves KV from a prefill worker to a decode worker. The files, in the order in which a transfer uses them:

ticket        all that a decode worker needs: the place of the KV and its lease, sealed with the cluster key
lease         how long a prefill worker keeps the blocks, and how a decode worker keeps that promise alive
proof         the numbers by which a reader knows that it has read the promised blocks
orders        the orders of an engine core to its transfer thread, and the news that come back
thread        the transfer thread, which follows the orders one round at a time; `mailbox` is its queue
peer          another worker from which this one reads: asked, met, gone
side_channel  the messages between workers over ZeroMQ, and the sockets at both ends
pull          one read of a trunk, from the order to the last byte that may be written
transport     the seam to the library that moves the bytes; `nixl` is the one that servers use
figures       the duration of pulls, for the metrics and the log
"""
