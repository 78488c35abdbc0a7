"""Events that tell other processes which prompt blocks a worker's prefix cache has.

    engine ──► BlockPublisher ══ ZeroMQ, vLLM's schema ══► Follower ──► the router's index

`changes` are the events as our own types, `schema` is their form on the wire, also those of other engines. A publisher
numbers its messages, so that a follower notices missed ones and asks for them.
"""
