#!/usr/bin/env bash
# Every check, on a fresh machine: installs what is missing, then format, lint, types, import contracts and tests.
#
#   bash deploy/test.sh                   all but the tests marked `long`
#   bash deploy/test.sh --all             those too
#   bash deploy/test.sh [--all] ARGS...   the rest goes to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=(-m "not long and not gpu")
if [ "${1:-}" = --all ]; then
    selection=(-m "not gpu")
    shift
fi
bash deploy/install.sh --dev
export PATH="$PWD/.venv/bin:$PATH"
say() { printf '[test %4ds] %s\n' "$SECONDS" "$*"; }

say "format"
ruff format --check .
say "lint"
ruff check .
say "types"
mypy
say "import contracts"
lint-imports
say "tests"
python -m pytest "${selection[@]}" "$@"
