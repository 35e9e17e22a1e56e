# Images of mgrpo, for CPUs and for NVIDIA GPUs. docs/containers.md explains their use.
#   docker build --target cpu -t mgrpo:cpu .
#   docker build --target cuda -t mgrpo:cuda .     (needs no GPU)
ARG BASE=debian:bookworm-slim

# Debian 12 has Python 3.11. A compiler and Python's headers are used at run time: vLLM and torch compile kernels when an
# engine starts. libseccomp2 filters the system calls of untrusted programs, libnuma1 is vLLM's, and tini reaps processes.
FROM ${BASE} AS system
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ libnuma1 libseccomp2 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/*
# A user without a password entry (docker run --user) also needs a name and a home.
ENV HOME=/home/mgrpo LOGNAME=mgrpo PATH=/opt/mgrpo/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN useradd --uid 1000 --home-dir "$HOME" mgrpo && mkdir -m 1777 "$HOME" /workspace
WORKDIR /workspace
ENTRYPOINT ["tini", "--", "mgrpo"]
CMD ["--help"]

FROM system AS cpu-packages
COPY requirements /src/requirements
RUN MGRPO_CUDA=0 sh /src/requirements/install.sh /opt/mgrpo packages

FROM cpu-packages AS cpu-wheel
COPY setup.py pyproject.toml README.md LICENSE /src/
COPY csrc /src/csrc
COPY mgrpo /src/mgrpo
RUN MGRPO_CUDA=0 pip wheel --no-deps --no-build-isolation --wheel-dir /wheels /src

FROM cpu-packages AS cpu
RUN --mount=from=cpu-wheel,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl
COPY --chown=1000 examples examples
USER 1000

# The packages bring CUDA's libraries and nvcc; the driver is the host's. libibverbs is for NCCL on InfiniBand.
FROM system AS cuda-packages
RUN apt-get update \
    && apt-get install -y --no-install-recommends ibverbs-providers libibverbs1 \
    && rm -rf /var/lib/apt/lists/*
COPY requirements /src/requirements
RUN MGRPO_CUDA=1 sh /src/requirements/install.sh /opt/mgrpo packages
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM cuda-packages AS cuda-wheel
COPY setup.py pyproject.toml README.md LICENSE /src/
COPY csrc /src/csrc
COPY mgrpo /src/mgrpo
RUN MGRPO_CUDA=1 pip wheel --no-deps --no-build-isolation --wheel-dir /wheels /src

FROM cuda-packages AS cuda
RUN --mount=from=cuda-wheel,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl
COPY --chown=1000 examples examples
USER 1000
