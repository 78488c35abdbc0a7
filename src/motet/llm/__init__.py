"""The Python API: `LLM` and `AsyncLLM` generate with a server that they start, or with a server that runs already.

    LLM ──thread with an event loop──► AsyncLLM ──► ServerClient ──HTTP──► motet serve, or any Motet server or gateway

Both ways of a program to generate, this API and HTTP, use the same routes, so the same request has the same tokens.

1. `sampling_params`, `prompts`   what the program gives, checked before anything is sent
2. `own_server`                   settings as keyword arguments, and the server as a child process
3. `bodies`, `client`, `limit`    the request, and how many of them run at a time
4. `answers`, `outputs`           the responses as objects with vLLM's names
"""
