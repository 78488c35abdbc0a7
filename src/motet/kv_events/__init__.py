"""Events with which other processes learn which prompt blocks are in a worker's prefix cache.

    engine ──► BlockPublisher ══ ZeroMQ, vLLM's schema ══► Follower ──► the router's index

`changes` has the events as Motet's own types, `event_schema` their form on the wire, also as sent by other engines. A
publisher numbers its messages, so that a follower detects missed messages and requests them."""
