"""Fake servers of other engines, on real sockets."""
