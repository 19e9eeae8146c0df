# What the device machine runs: `bash staging/world/device.sh first|last SECONDS SECONDS`.
set -o pipefail
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit 1
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
repo=$PWD
cd staging/world
flow="--batch 2048 --log 250"
if [ "$1" = first ]; then
  timeout 210 python3 pretrain.py vae $OUT --seconds $2 --batch 128 --workers 14 --compile --log 250 2>&1 | tee -a $OUT/log.txt || exit 1
  python3 pretrain.py flow $OUT --vae $OUT/vae.safetensors --seconds $3 $flow --workers 14 --compile 2>&1 | tee -a $OUT/log.txt
else
  python3 pretrain.py decoder $OUT --vae $repo/.pre/vae.safetensors --seconds $2 --batch 256 --lr 1e-3 --workers 6 --log 100 2>&1 | tee -a $OUT/decoder.txt &
  python3 pretrain.py flow $OUT --vae $repo/.pre/vae.safetensors --init $repo/.pre/right.safetensors --seconds 0 --wrong $3 $flow --log 50 --ring 262144 --workers 7 --saves 1 2>&1 | tee -a $OUT/flow.txt
  wait
fi
