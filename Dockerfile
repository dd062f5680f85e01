# CUDA runtime with automodel installed; runs as an ordinary user.
#   docker build -t automodel .
#   docker run --gpus all --shm-size 8g -v "$PWD:/workspace" automodel finetune llm -c quickstart
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc git \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/automodel
ENV PATH=/opt/automodel/bin:$PATH PYTHONUNBUFFERED=1

# torch changes rarely: its own layer keeps rebuilds short.
RUN pip install --no-cache-dir "torch>=2.11,<2.14"
COPY pyproject.toml README.md LICENSE /src/
COPY automodel_cli /src/automodel_cli
COPY recipes /src/recipes
COPY conf /src/conf
RUN pip install --no-cache-dir "/src[peft]"

RUN useradd --create-home --uid 10001 automodel && mkdir /workspace && chown automodel /workspace
USER automodel
WORKDIR /workspace
ENTRYPOINT ["automodel"]
CMD ["--help"]
