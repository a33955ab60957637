# Serves: docker build --build-arg BACKEND=cuda13 --tag redraft . (or cuda12; cpu by default). It listens on all addresses of its container, on
# port 8321, and so needs a key (docs/operations.md): docker run --publish 8321:8321 --env REDRAFT_API_KEY=... redraft. Models, database and
# adapters are in the volume /data.
FROM python:3.11.14-slim-bookworm AS build
RUN pip install --no-cache-dir uv==0.13.9
WORKDIR /app
ARG BACKEND=cpu
ENV UV_CACHE_DIR=/cache UV_LINK_MODE=copy UV_PROJECT_ENVIRONMENT=/opt/redraft UV_PYTHON_DOWNLOADS=never
COPY pyproject.toml README.md LICENSE NOTICE ./
RUN --mount=type=cache,target=/cache \
    uv sync --no-default-groups --extra "$BACKEND" --extra postgres --no-install-project
COPY service service
COPY migrations migrations
RUN --mount=type=cache,target=/cache \
    uv sync --no-default-groups --extra "$BACKEND" --extra postgres --no-editable

FROM python:3.11.14-slim-bookworm AS production
RUN groupadd --system --gid 8321 redraft \
    && useradd --system --uid 8321 --gid redraft --home-dir /data --shell /usr/sbin/nologin redraft \
    && install --directory --owner redraft --group redraft --mode 700 /data
COPY --from=build /opt/redraft /opt/redraft
ENV PATH=/opt/redraft/bin:$PATH \
    REDRAFT_HOME=/data HF_HOME=/data/huggingface MLX_PTX_CACHE_DIR=/data/kernels
# By its number: Kubernetes takes no name for proof that a user is not root (runAsNonRoot).
USER 8321:8321
WORKDIR /data
VOLUME /data
EXPOSE 8321
# Longer than server.drain_seconds: docker stop --timeout 90
STOPSIGNAL SIGTERM
CMD ["redraft", "serve", "--host", "0.0.0.0", "--port", "8321"]
