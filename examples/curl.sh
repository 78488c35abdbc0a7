#!/usr/bin/env bash
# Calls the API with curl. Needs a running server (make serve). Usage: examples/curl.sh [http://127.0.0.1:8000]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}

echo "# four choices in one answer"
curl --silent --show-error --fail-with-body "$url/v1/chat/completions" --header 'Content-Type: application/json' --data '{
  "messages": [{"role": "user", "content": "Give a name for a boat."}],
  "n": 4,
  "max_tokens": 20,
  "temperature": 0.6,
  "seed": 1
}'
echo

echo "# the same request, streamed: the chunks of the choices are interleaved, each with its index"
curl --silent --show-error --fail-with-body --no-buffer "$url/v1/chat/completions" --header 'Content-Type: application/json' --data '{
  "messages": [{"role": "user", "content": "Give a name for a boat."}],
  "n": 4,
  "max_tokens": 20,
  "temperature": 0.6,
  "seed": 1,
  "stream": true,
  "stream_options": {"include_usage": true}
}'

echo "# two prompts with two choices each: index = prompt * n + choice"
curl --silent --show-error --fail-with-body "$url/v1/completions" --header 'Content-Type: application/json' --data '{
  "prompt": ["The sea is", "The sky is"],
  "n": 2,
  "max_tokens": 8,
  "temperature": 0.6
}'
echo

echo "# the state of the server"
curl --silent --show-error --fail-with-body "$url/status"
echo
