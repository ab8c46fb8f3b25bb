# Everything on a CPU: the environment, the quick runs, and JupyterLab on the notebooks.
#   docker build -t fact_nb .
#   docker run --rm fact_nb make reproduce
#   docker run --rm -p 8888:8888 fact_nb
FROM python:3.11-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends git make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /fact_nb
COPY . .
RUN make setup
EXPOSE 8888
CMD ["make", "lab", "ARGS=--no-browser --ip=0.0.0.0"]
