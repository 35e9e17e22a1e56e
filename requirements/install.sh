#!/bin/sh
# Install mgrpo into the virtual environment VENV (created if missing): sh requirements/install.sh VENV [dev | packages]
# dev: also what tests and linters need; packages: everything but mgrpo itself.
# With an NVIDIA driver the GPU packages, otherwise the CPU packages; MGRPO_CUDA=0 or 1 overrides this.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
python=${PYTHON:-python3}
torch_cpu=torch==2.13.0+cpu
oldest_driver=580 # of CUDA 13, for which gpu.txt's torch is built
torch_cpu_index=https://download.pytorch.org/whl/cpu

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
3.11) ;;
3.12 | 3.13) echo "mgrpo: the tests have passed with Python $version as well (docs/installing.md), but only 3.11 is tested with every change" >&2 ;;
*)
    echo "mgrpo: the pinned packages exist for Python 3.11 to 3.13, but $python is $version; set PYTHON=/path/to/python3.11" >&2
    exit 1
    ;;
esac
cuda=${MGRPO_CUDA:-auto}
has_driver=0
if command -v nvidia-smi >/dev/null 2>&1; then has_driver=1; fi
if [ "$cuda" = auto ]; then cuda=$has_driver; fi
# MGRPO_CUDA=1 also installs on a machine without a GPU, for others.
if [ "$cuda" = 1 ] && [ "$has_driver" = 1 ]; then
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1 | head -n 1)
    case $driver in
    [0-9]*) ;;
    *)
        echo "mgrpo: nvidia-smi tells no driver version but '$driver'; repair the NVIDIA driver, or set MGRPO_CUDA=0 to install for the CPU" >&2
        exit 1
        ;;
    esac
    if [ "${driver%%.*}" -lt "$oldest_driver" ]; then
        echo "mgrpo: the NVIDIA driver is $driver, but the GPU packages (CUDA 13) need $oldest_driver or newer; update the driver, or set MGRPO_CUDA=0 to install for the CPU" >&2
        exit 1
    fi
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

if [ "$cuda" = 1 ]; then
    echo "mgrpo: installing the GPU packages into $venv"
    pip install -r "$here/gpu.txt" -c "$here/gpu.lock"
else
    echo "mgrpo: installing torch (CPU build) into $venv"
    # No CUDA build satisfies the local version +cpu. Some indexes have it; PyTorch's own always does.
    if ! pip install "$torch_cpu" 2>/dev/null && ! pip install "$torch_cpu" --index-url "$torch_cpu_index"; then
        echo "mgrpo: no index that can be reached has $torch_cpu for Python $version; installing the CUDA build, which also runs on CPUs and takes 5 GB more" >&2
        pip install "${torch_cpu%+cpu}" -c "$here/gpu.lock"
    fi
    echo "mgrpo: installing the CPU packages"
    pip install --no-deps -r "$here/cpu.txt"
fi
if [ "${2:-}" = dev ]; then
    echo "mgrpo: installing the development packages"
    pip install --no-deps -r "$here/dev.txt"
    # The tests use vLLM's own server as a judge; on a GPU machine vllm has installed all that it needs.
    if [ "$cuda" = 0 ]; then pip install --no-deps -r "$here/judge.txt"; fi
fi
if [ "${2:-}" = packages ]; then exit; fi
echo "mgrpo: building the extension"
MGRPO_CUDA=$cuda pip install --no-deps --no-build-isolation -e "$here/.."
