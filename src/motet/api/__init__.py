"""The HTTP side of a server. Folders and modules from the bottom up; each sees those above it in this list:

http/                    what every request passes: ids, keys, limits, its body, errors, spans
tensor_bodies, known_groups, served, service    what routes share: bodies of tensors, groups by id, models, workers
generation/              what all routes that generate share: the request as a plan, its groups, its response
texts/                   requests for models on third-party servers, which take texts
openai/                  OpenAI's routes;  anthropic/  vllm/  sglang/  the routes of the other dialects
trainers/  worker/       routes that pause a server and bring it new weights (`--rl`); the server as a gateway's worker
operators/  page/        status, metrics and membership; the page in a browser
openapi, app             the description of the routes; the application

`tools/layers.py` enforces the order."""
