"""vLLM servers as engines: token ids over HTTP, with each child of a request a choice of ours.

plan      pure: turns a group into requests, with the JSON of each and the tickets in it
wire      pure: reads the answers, with log-probabilities and errors
report    pure: makes a report from a server's metrics and lists
server    one server, which is asked what it offers
engine    a server as an `Engine`, with the connections of each group joined to one stream
"""
