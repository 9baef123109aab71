# labkit with the CPU build of PyTorch, for one person and, as the image of a JupyterHub, for a class (docs/install.md).
#
#     docker build --tag labkit .
#     docker run --rm --publish 127.0.0.1:8888:8888 --volume labkit:/home/learner labkit
FROM debian:trixie-slim

# A compiler for the labs on torch.compile; Python 3.13 is Debian's own.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# It has to be that of the hub, or a version next to it.
ARG JUPYTERHUB=6.*
COPY . /src
RUN python3 -m venv /opt/labkit \
    && /opt/labkit/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
        --constraint /src/constraints.txt "/src[notebook]" "jupyterhub==${JUPYTERHUB}" \
    && rm -rf /src

RUN useradd --create-home --uid 1000 learner
USER learner
WORKDIR /home/learner
ENV PATH=/opt/labkit/bin:$PATH
EXPOSE 8888
# First the copies of new labs into my/ of the home, which may be a volume; what the learner wrote stays. A hub gives the
# command, jupyterhub-singleuser.
ENTRYPOINT ["sh", "-c", "labkit update >/dev/null; exec \"$@\"", "labkit"]
CMD ["labkit", "lab", "--no-browser", "--jupyter-options=--ip=0.0.0.0"]
