#!/usr/bin/env bash
# Creates an environment with Motet, torch and TRL in this folder, starts a server, and trains with three seeds.
#
#     examples/trl_grpo/run.sh [STEPS]        32 steps by default: a quarter of an hour on two cores, and 2 GB of packages
#     PEFT=1 examples/trl_grpo/run.sh         trains a LoRA adapter instead of all weights
#
# Results are in examples/trl_grpo/out: one line of JSON per step, and rewards.png.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=examples/trl_grpo
out=${OUT:-$here/out}
steps=${1:-32}
port=${PORT:-8300}
bin=${ENVIRONMENT:-$here/.venv}/bin

if [ ! -e $bin/motet ]; then
  python3 -m venv $here/.venv
  $bin/python -m pip install --quiet torch==2.13.0
  $bin/python -m pip install --quiet . trl==1.16.0 peft==0.21.2 matplotlib==3.11.2
fi

# The server and the trainer share the cores, so their threads must not spin for long while they wait.
export GOMP_SPINCOUNT=1000 TRL_EXPERIMENTAL_SILENCE=1
model=$($bin/motet models pull smollm2 | tail -n 1)
mkdir -p $out
rm -f $out/*.jsonl
$bin/motet serve smollm2 --rl --dtype float32 --kv-cache-gb 1 --port "$port" &
trap 'kill $! 2>/dev/null || true; wait' EXIT
until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health"; do sleep 1; done

for seed in 1 2 3; do
  $bin/python -m examples.trl_grpo.train --model "$model" --server "http://127.0.0.1:$port" \
    --seed $seed --steps "$steps" --out $out/seed$seed.jsonl ${PEFT:+--peft}
done
$bin/python -m examples.trl_grpo.plot $out/rewards.png $out/seed[123].jsonl
