# What the device machine runs, in two calls: `bash staging/world/device.sh first` and `... second`.
set -o pipefail
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit 1
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
cd staging/world
flow="--batch 2048 --workers 14 --compile --log 250"
if [ "$1" = first ]; then
  nvidia-smi --query-gpu=name,memory.total --format=csv,noheader; df -h /dev/shm | tail -1
  timeout 210 python3 pretrain.py vae /tmp/out --seconds ${2:-145} --batch 128 --workers 14 --compile --log 250 2>&1 | tee -a $OUT/log.txt || exit 1
  cp /tmp/out/vae.* $OUT/
  timeout ${4:-390} python3 pretrain.py flow /tmp/out --vae /tmp/out/vae.safetensors --seconds ${3:-340} $flow 2>&1 | tee -a $OUT/log.txt
  cp /tmp/out/right.* /tmp/out/captions.txt $OUT/
else
  timeout 230 python3 pretrain.py flow /tmp/out --vae /tmp/out/vae.safetensors --init /tmp/out/right.safetensors --seconds 0 --wrong $2 $flow --saves 1 2>&1 | tee -a $OUT/log.txt
  cp /tmp/out/wrong* $OUT/
fi
