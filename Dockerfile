# An image with the program `hydra` and the Python package, of the files that a release has:
#
#   docker build -t hydra . && docker run --rm -v "$PWD:/work" hydra --steps 20
#   docker run --rm -it -v "$PWD:/work" --entrypoint python hydra
FROM rust:1.95-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
COPY . /hydra
RUN /hydra/release/build /dist

FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
RUN --mount=from=build,source=/dist,target=/dist \
    mkdir /opt/hydra && tar -xzf /dist/hydra-*.tar.gz -C /opt/hydra --strip-components 1 && ln -s /opt/hydra/hydra /usr/local/bin/ \
    && python3 -m venv /opt/python && /opt/python/bin/pip install --no-cache-dir --no-index /dist/hydra_train-*.whl
ENV PATH="/opt/python/bin:$PATH"
WORKDIR /work
ENTRYPOINT ["hydra"]
