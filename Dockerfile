# CUDA runtime with automodel installed; runs as an ordinary user, or as yours.
#   docker build -t automodel .
#   docker build -t automodel --build-arg EXTRAS=peft,te,megatron --build-arg BASE=devel .
#   docker run --gpus all --shm-size 8g -v "$PWD:/workspace" -v automodel-hub:/cache/huggingface \
#     --user "$(id -u):$(id -g)" automodel finetune llm -c quickstart
# With InfiniBand or RoCE add: --device /dev/infiniband --ulimit memlock=-1

# "runtime" has no compiler; "devel" has nvcc, for an extra that is compiled here (te where no wheel fits the versions).
ARG BASE=runtime
FROM nvidia/cuda:13.0.1-${BASE}-ubuntu24.04

# gcc and python3-dev: triton compiles its launchers with them at run time. rdma-core: NCCL over InfiniBand.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc g++ git rdma-core ibverbs-providers \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/automodel
ENV PATH=/opt/automodel/bin:$PATH PYTHONUNBUFFERED=1

# torch changes rarely: its own layer keeps rebuilds short. The constraint keeps extras from replacing it.
ARG TORCH=2.13.0
RUN pip install --no-cache-dir "torch==${TORCH}" && echo "torch==${TORCH}" > /opt/automodel/constraints.txt

# Any of te, vllm, vlm, megatron, fa4, peft, rewards, mcp, verifiers, tracking, gguf, qat, eval, s3, quality, sweep, with commas between them.
ARG EXTRAS=peft
COPY pyproject.toml README.md LICENSE /src/
COPY automodel_cli /src/automodel_cli
COPY recipes /src/recipes
COPY conf /src/conf
RUN pip install --no-cache-dir --constraint /opt/automodel/constraints.txt "/src[${EXTRAS}]"

# Under --user there is no entry in /etc/passwd and no home of one's own: what is written lies in places that anyone may
# write to. LOGNAME is what getpass asks before the password file.
ENV HOME=/home/automodel LOGNAME=automodel USER=automodel \
    HF_HOME=/cache/huggingface AUTOMODEL_CACHE=/cache/automodel \
    TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor
RUN useradd --create-home --uid 10001 automodel \
    && mkdir -p /workspace /cache/huggingface /cache/automodel /cache/triton /cache/inductor \
    && chown -R automodel /workspace /cache \
    && chmod -R a+rwX /workspace /cache /home/automodel
USER 10001
WORKDIR /workspace
VOLUME ["/cache/huggingface"]
ENTRYPOINT ["automodel"]
CMD ["--help"]
