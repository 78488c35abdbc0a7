"""The bodies of requests, a module a route: what a field may be, and what is refused before anything else is looked at.

shared        what all have in common: strict types, fields that ask for nothing, sampling, streaming, forms of answers
chat          /v1/chat/completions: messages, tools
completions   /v1/completions, /inference/v1/generate, /tokenize and /detokenize
responses     /v1/responses: items in place of messages
messages      /v1/messages: blocks in place of parts, as Anthropic has them
"""
