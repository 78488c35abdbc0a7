"""`motet batch`: files of requests in OpenAI's batch format. Every line gets a result or an error.

1. `jsonl_input`, `table_files`, `rows`        the lines of an input: JSONL, Parquet or a dataset
2. `requests`, `id_table`                      which lines have no result, and in which order they are sent
3. `run`, `concurrency`                        how many requests are in progress, their retries, and the figures
4. `sender`, `response_memory`, `server_watch` HTTP, the meaning of a response, and a server that does not answer
5. `output_file`, `line_file`, `line_reader`   the files of results and errors

The server's Batch API (`motet.api.batches`) also uses `lines`, which parses and makes lines without I/O, `line_file`
and `line_reader`."""
