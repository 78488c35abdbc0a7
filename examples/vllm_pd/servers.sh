#!/usr/bin/env bash
# Runs two vLLM servers, one for prefill and one for decode, with Motet's gateway in front of them, until Ctrl-C.
#
#     examples/vllm_pd/servers.sh MODEL [vllm]        MODEL: a folder or hub name; vllm: the executable, if not on the PATH
#
# Without `motet` on the PATH, the script uses the one that `make` installs (.venv/bin/motet), or MOTET=path.
#
# The script is for two CPU cores without a GPU. For GPUs, use CUDA_VISIBLE_DEVICES instead of taskset, and remove
# VLLM_CPU_* and kv_buffer_device.
set -euo pipefail
model=$1
vllm=${2:-vllm}
motet=${MOTET:-$(command -v motet || echo "$(dirname "$0")/../../.venv/bin/motet")}
prefill=8101
decode=8102
gateway=8100

serve() { # arguments: core, port, side channel. exec replaces the shell, so that the trap kills the server itself
  exec env VLLM_CPU_OMP_THREADS_BIND="$1" VLLM_CPU_KVCACHE_SPACE=1 VLLM_NIXL_SIDE_CHANNEL_PORT="$3" \
    taskset --cpu-list "$1" "$vllm" serve "$model" --port "$2" --served-model-name example --enforce-eager \
    --max-model-len 4096 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}'
}

trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
serve 0 $prefill 5601 &
serve 1 $decode 5602 &
"$motet" gateway --port $gateway --tokenizer "$model" \
  --worker "http://127.0.0.1:$prefill,prefill" \
  --worker "http://127.0.0.1:$decode,decode"
