#!/bin/bash
# run.sh COMMAND...: one command on CPU 1 with this clone's code
cd /tmp/h/reader1
export PYTHONPATH=/tmp/h/reader1/src:/tmp/h/reader1/lab/src:/tmp/h/reader1/benchmarks OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PATH=/work/main/.venv/bin:$PATH
exec taskset -c 1 nice -n -7 timeout 300 "$@"
