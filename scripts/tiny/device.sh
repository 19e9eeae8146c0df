# What the device machine runs: `bash scripts/tiny/device.sh first 145 335` or `... flow 400`, the second after
# `git archive cb6b6f36 staging | tar x`, which has the state of the pretraining.
set -o pipefail
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit 1
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
repo=$PWD
cd scripts/tiny
flow="--batch 2048 --log 250"
state=$repo/staging/state
case $1 in
first) # the autoencoder, then the flow on right captions, from nothing
  timeout 210 python3 pretrain.py vae $OUT --seconds $2 --batch 128 --workers 14 --compile --log 250 2>&1 | tee -a $OUT/log.txt || exit 1
  python3 pretrain.py flow $OUT --vae $OUT/vae.safetensors --seconds $3 $flow --workers 14 --compile 2>&1 | tee -a $OUT/log.txt
  ;;
flow) # the flow on, from the staged state, and the decoder beside it
  python3 pretrain.py decoder $OUT --vae $state/vae.safetensors --seconds $2 --batch 256 --lr 1e-3 --workers 5 --log 100 2>&1 | tee -a $OUT/decoder.txt &
  python3 pretrain.py flow $OUT --vae $state/vae.safetensors --init $state/right.safetensors --seconds $2 ${flow/2048/4096} --workers 9 --compile 2>&1 | tee -a $OUT/flow.txt
  wait
  ;;
esac
