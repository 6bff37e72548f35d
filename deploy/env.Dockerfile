# The environment service: docker build -f deploy/env.Dockerfile -t ludus-env .
#
# ScienceWorld and TextWorldExpress need Java. ALFWorld's planner is built in this file:
#   --build-arg EXTRAS=serve,scienceworld --build-arg PACKAGES=default-jre-headless
FROM python:3.12-slim-bookworm AS build
ARG EXTRAS=serve,envs,webshop,reasoning
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python -m venv /opt/ludus \
    && /opt/ludus/bin/pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

FROM python:3.12-slim-bookworm
ARG PACKAGES=""
# hadolint ignore=DL3008,SC2086
RUN if [ -n "$PACKAGES" ]; then \
        apt-get update \
        && apt-get install -y --no-install-recommends $PACKAGES \
        && rm -rf /var/lib/apt/lists/*; \
    fi \
    && useradd --create-home --home-dir /srv/ludus --uid 10001 ludus
COPY --from=build /opt/ludus /opt/ludus
ENV PATH=/opt/ludus/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /srv/ludus
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s CMD \
    ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["ludus", "serve", "env", "--host", "0.0.0.0", "--port", "8000"]
CMD ["textcraft", "babyai"]
