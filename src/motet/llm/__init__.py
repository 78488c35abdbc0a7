"""The Python API: `LLM` and `AsyncLLM` generate with a server that they start, or with a server that runs already.

    LLM ──thread with an event loop──► AsyncLLM ──► ServerClient ──HTTP──► motet serve, or any Motet server or gateway

The API sends the requests of the HTTP API, so that the same request has the same tokens in both.

1. `sampling_params`, `prompts`   the arguments, checked before anything is sent
2. `own_server`                   settings as keyword arguments, and the server as a child process
3. `requests`, `running`          the body of a request, and the requests of many prompts
4. `client`, `limit`, `failures`  HTTP with retries, the number of choices in progress, errors as exceptions
5. `wire`, `outputs`              the responses, and the objects that are returned, with vLLM's names
"""
