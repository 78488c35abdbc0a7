#!/usr/bin/env bash
# Requests eight choices of one prompt; it is prefilled and transferred once. Usage: examples/vllm_pd/ask.sh [GATEWAY]
set -euo pipefail
url=${1:-http://127.0.0.1:8100}
story=$(printf 'In year %d the harbour had many ships and few boats. ' {1900..1930})

curl --silent --show-error --fail-with-body "$url/v1/completions" --header 'Content-Type: application/json' --data '{
  "prompt": "'"$story"'",
  "n": 8,
  "max_tokens": 16
}'
echo
curl --silent --show-error --fail-with-body "$url/status"
echo
