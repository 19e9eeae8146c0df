# docker build -t flowalign .
# docker run --rm --gpus all --shm-size 8g -v "$PWD/outputs:/flowalign/outputs" -v "$HOME/.cache/huggingface:/cache" flowalign \
#     accelerate launch train.py --config configs/tiny/student_flow_opd.yaml
# flowalign in the versions of requirements.lock, with the extras clip and serve. Without a GPU, build the CPU's torch:
#     docker build -t flowalign --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# A GPU needs NVIDIA's container toolkit on the host. PyPI's torch brings CUDA itself.
FROM python:3.11-slim

ARG TORCH="torch==2.13.0 torchvision==0.28.0"
ARG TORCH_INDEX=https://pypi.org/simple

# a compiler: for torch.compile
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libc6-dev libglib2.0-0 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /flowalign
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# before the code, so that a change of it does not download torch again
RUN python -m pip install --index-url "$TORCH_INDEX" $TORCH
COPY . .
RUN python -m pip install --constraint requirements.lock --editable '.[clip,serve]' \
    && useradd --create-home user && mkdir -p outputs data /cache && chown user outputs data /cache

USER user
ENV HF_HOME=/cache
CMD ["flowalign", "--help"]
