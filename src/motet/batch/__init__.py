"""Files of requests in OpenAI's batch format. `lines.py` parses and makes lines, without I/O, for the command line and
for the server's Batch API."""
