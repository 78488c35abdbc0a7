"""vLLM servers as engines: token ids over HTTP, where each child of a vLLM request is a choice.

requests      pure: a group as requests to vLLM, with the JSON of each and the tickets in it
vllm_wire     pure: reads the answers, with log-probabilities and errors
report        pure: a server's report, made from its metrics and lists
vllm_server   one server, whose routes are detected
vllm_engine   a server as an `Engine`: the connections of each group as one stream
"""
