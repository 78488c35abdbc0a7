"""vLLM servers as engines: token ids over HTTP, with each child of a request a choice of ours."""
