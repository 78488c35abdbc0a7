"""Servers of other engines, played on real sockets."""
