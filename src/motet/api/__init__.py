"""The HTTP side of a server.

app, service, served    the application and its layers; what all routes share; the models that a server serves
http/                   what every request passes: identification, keys, limits, the body, errors, spans
generation/             what all routes that generate share: the checked request as a plan, its groups, its response
openai/  anthropic/  sglang/  vllm/     routes of one dialect each, with the schemas of their bodies
texts/                  requests for models on third-party servers, which take texts
trainers/               routes that pause a server and bring it new weights (`--rl`)
worker/                 this server as a worker of a gateway
operators/  page/       status, metrics and membership; the page in a browser
"""
