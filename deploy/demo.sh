#!/usr/bin/env bash
# The main job on a fresh machine: installs what is missing, then starts everything, drives traffic through the
# `openai` client, learns from it, swaps better policies in, and prints the evidence. Arguments go to `ratchet demo`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash deploy/install.sh
exec .venv/bin/ratchet demo "$@"
