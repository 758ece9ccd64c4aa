# CPU:   docker build --target cpu -t sparse-rl .
# CUDA:  docker build --target cuda -t sparse-rl:cuda .        --build-arg ARCHS=90 compiles for one compute capability
#        docker run --gpus all --user "$(id -u):$(id -g)" -v "$PWD:/runs" sparse-rl:cuda fit --config my.yaml

FROM python:3.12-slim-bookworm AS cpu
# an index with torch's CPU builds, which are a tenth the size
ARG PIP_EXTRA_INDEX_URL=""
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ make \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 user
WORKDIR /src
# torch first: the kernels are compiled against the torch that they will run with
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch setuptools wheel
COPY pyproject.toml setup.py README.md LICENSE ./
COPY cuda_ext cuda_ext
COPY exact_answers exact_answers
COPY sparse_rl_lightning sparse_rl_lightning
RUN SPARSE_RL_BUILD=cpu pip install --no-cache-dir -c constraints.txt --no-build-isolation '.[report,lora]'
COPY configs /configs
COPY examples /configs/examples
# any user may run it, one without an entry in passwd too, whose downloads stay in /runs; real.yaml imports examples
ENV HOME=/runs USER=user PYTHONPATH=/configs
USER 10001
WORKDIR /runs
RUN sparse-rl doctor
ENTRYPOINT ["sparse-rl"]

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS cuda
ARG ARCHS=""
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ make python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 user \
 && python3 -m venv /venv
ENV PATH=/venv/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch setuptools wheel
COPY pyproject.toml setup.py README.md LICENSE ./
COPY cuda_ext cuda_ext
COPY exact_answers exact_answers
COPY sparse_rl_lightning sparse_rl_lightning
RUN SPARSE_RL_BUILD=cuda SPARSE_RL_ARCHS="$ARCHS" pip install --no-cache-dir -c constraints.txt --no-build-isolation '.[report,lora]'
COPY configs /configs
COPY examples /configs/examples
# any user may run it, one without an entry in passwd too, whose downloads stay in /runs; real.yaml imports examples
ENV HOME=/runs USER=user PYTHONPATH=/configs
USER 10001
WORKDIR /runs
ENTRYPOINT ["sparse-rl"]
