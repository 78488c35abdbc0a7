"""OpenAI-compatible servers of any kind as sources of texts, with groups of n choices.

text_source      the interface: requests, answers, and the function that generates
bodies           pure: the bodies that are sent, and the pieces of choices in the bodies and chunks that are received
upstream_server  connections, keys and time-outs of a server, the errors for its failures, its report and abilities
text_upstream    the server as seen by its keeper and by routing, and its groups
"""
