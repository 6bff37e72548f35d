# Training: docker build -f deploy/train.Dockerfile -t ludus-train .
# CMD is the recipe and its overrides; LUDUS_MIRROR is the storage of the run. See deploy/train.sh.
#
# For Ray on Kubernetes (deploy/kuberay/), with the wget of KubeRay's probes:
#   --build-arg EXTRAS=train,envs,remote,metrics,s3,ray --build-arg PACKAGES=wget -t ludus-ray
#
# torch from the package index includes its CUDA libraries. The host needs the driver and the container
# toolkit. For a CPU, point pip to torch's CPU build (docs/installation.md).
FROM python:3.12-slim-bookworm AS build
ARG EXTRAS=train,envs,webshop,reasoning,remote,metrics,postgres,s3
WORKDIR /src
COPY . .
RUN python -m venv /opt/ludus \
    && /opt/ludus/bin/pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

FROM python:3.12-slim-bookworm
ARG PACKAGES=""
# The compiler builds native code for the host's processor.
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev $PACKAGES \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --home-dir /srv/ludus --uid 10001 ludus \
    && install -d -o ludus /runs /srv/ludus/.cache
COPY --from=build /opt/ludus /opt/ludus
COPY recipes /srv/ludus/recipes
COPY --chmod=755 deploy/train.sh /usr/local/bin/train.sh
ENV PATH=/opt/ludus/bin:$PATH PYTHONUNBUFFERED=1 LUDUS_RUNS_DIR=/runs
USER 10001
WORKDIR /srv/ludus
VOLUME /runs
STOPSIGNAL SIGTERM
ENTRYPOINT ["train.sh"]
CMD ["recipes/babyai-tiny.yaml"]
