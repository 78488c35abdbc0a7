"""The HTTP side of a server. A request passes, from top to bottom:

app, caller             what surrounds every route: ids, keys, body size; `failure`: how errors look
schemas/                the body
chat, completions, generate, responses       the routes that generate; `upstream`: models that other servers have
kv_params, plan, admission                   what is checked of a request, and what the engine gets of it
answer, groups, collect, response_output     the response and its groups; each route's own writer makes the bytes
engine_routes           this server as a worker of a gateway
models, operators       what is served, how it is, who works for it
service, served         what the routes share: models, workers, settings, limits, metrics
"""
