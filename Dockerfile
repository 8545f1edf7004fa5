# lit-grpo on a host with NVIDIA cards (driver and container toolkit come from the host):
#
#     docker build -t lit-grpo .
#     docker run --gpus all --ipc host -v "$PWD":/work lit-grpo fit --config config.yaml
#
# CUDA comes with torch's wheels, so a plain Python image is enough. The compiler is for Triton, which builds kernels at run
# time. --ipc host: engine processes and loaders share memory.
FROM python:3.12-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ git libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# Dependencies first, so that a change of the code does not install them again.
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir lit_grpo && python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['vllm'], *p['optional-dependencies']['lora'], *p['optional-dependencies']['hub'], sep='\n')" > /tmp/requirements.txt \
    && pip install --no-cache-dir -r /tmp/requirements.txt -c constraints.txt
COPY . .
RUN pip install --no-cache-dir --no-deps .
# Caches of models and compiled kernels survive a container where these folders are mounted.
ENV HF_HOME=/cache/huggingface TORCHINDUCTOR_CACHE_DIR=/cache/inductor PYTHONUNBUFFERED=1
WORKDIR /work
ENTRYPOINT ["lit-grpo"]
CMD ["--help"]
