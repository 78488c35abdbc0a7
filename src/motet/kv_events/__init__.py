"""Which prompt blocks a worker's prefix cache can find, told from process to process as it changes.

    engine ──► BlockPublisher ══ ZeroMQ, vLLM's schema ══► Follower ──► whoever routes

`changes` are the events in our own words, `schema` is how they look on the wire, `stored_now` what they add up to. A
publisher numbers what it says, so that a follower notices what it missed and asks again.
"""
