# The model service: docker build -f deploy/model.Dockerfile -t ludus-model .
# CMD is the checkpoint: a run's folder or a Hugging Face folder, mounted at /models.
#
# torch from the package index includes its CUDA libraries. The host needs the driver and the container
# toolkit. For a CPU, point pip to torch's CPU build (docs/installation.md).
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN python -m venv /opt/ludus \
    && /opt/ludus/bin/pip install --no-cache-dir -c constraints.txt ".[serve,train]"

FROM python:3.12-slim-bookworm
# The compiler builds the sampler's native code for the host's processor.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --home-dir /srv/ludus --uid 10001 ludus \
    && install -d -o ludus /srv/ludus/.cache
COPY --from=build /opt/ludus /opt/ludus
ENV PATH=/opt/ludus/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /srv/ludus
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s CMD \
    ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["ludus", "serve", "model", "--host", "0.0.0.0", "--port", "8000"]
CMD ["/models/policy"]
