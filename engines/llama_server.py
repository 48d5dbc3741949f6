"""llama.cpp's HTTP server, which the package xllamacpp brings compiled, with the flags of llama-server that we use.

``make engines`` installs this file as .engines/llama.cpp/bin/llama-server.
"""

import argparse
import signal

import xllamacpp

parser = argparse.ArgumentParser(prog="llama-server", description=__doc__, allow_abbrev=False)
parser.add_argument("--model", required=True)
parser.add_argument("--lora", action="append", default=[], help="An adapter; once for each.")
parser.add_argument("--lora-init-without-apply", action="store_true")
parser.add_argument("--threads", type=int, default=-1, help="-1: as many as the machine has.")
parser.add_argument("--parallel", type=int, default=1, help="How many requests are computed together.")
parser.add_argument("--ctx-size", type=int, default=0, help="Tokens for all of them; 0: as the model says.")
parser.add_argument("--flash-attn", choices=("on", "off", "auto"), default="auto")
parser.add_argument("--cache-type-k", choices=("f32", "f16"), default="f16")
parser.add_argument("--cache-type-v", choices=("f32", "f16"), default="f16")
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, default=8080)
said = parser.parse_args()

params = xllamacpp.CommonParams()
params.model.path = said.model
params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(file, 1.0) for file in said.lora]
params.lora_init_without_apply = said.lora_init_without_apply
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = said.threads
params.n_parallel, params.n_ctx = said.parallel, said.ctx_size
attention = xllamacpp.llama_flash_attn_type
params.flash_attn_type = {
    "on": attention.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": attention.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    "auto": attention.LLAMA_FLASH_ATTN_TYPE_AUTO,
}[said.flash_attn]
cache = {"f32": xllamacpp.ggml_type.GGML_TYPE_F32, "f16": xllamacpp.ggml_type.GGML_TYPE_F16}
params.cache_type_k, params.cache_type_v = cache[said.cache_type_k], cache[said.cache_type_v]
params.hostnames, params.port = [said.host], said.port

server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
signal.pause()
