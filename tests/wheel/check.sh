#!/usr/bin/env bash
# A clean clone becomes an sdist, the sdist a wheel (in pip's own build environment, nothing of .venv), the wheel is installed in a new environment and
# trains there, outside any checkout. torch is not downloaded again: the new environment sees the packages of the Python given, but not the checkout.
#   tests/wheel/check.sh .venv/bin/python
set -euo pipefail
py=$(realpath -s "$1") root=$(cd "$(dirname "$0")/../.." && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH MAKEFLAGS MFLAGS MAKELEVEL

git clone -q "$root" "$tmp/clone"
cd "$tmp/clone"
"$py" -c 'from setuptools import build_meta; build_meta.build_sdist("../dist")' > "$tmp/sdist.log"
cd "$tmp"
tar tf dist/ortmodule-*.tar.gz | sed 's,^[^/]*/,,' | sort > packed
git -C clone ls-files -s csrc ortmodule optim Makefile setup.py pyproject.toml README.md LICENSE |
    sed -n 's/^100[0-9 a-f]*\t//p' | sort | comm -23 - packed > missing
[ ! -s missing ] || { echo "the sdist lacks: $(cat missing)"; exit 1; }
# kernels as the checkout's build has them: compiling them takes minutes, and that they are compiled is no question of packaging
[ ! -d "$root/build/kernels" ] || export KB="$root/build" OWN=
"$py" -m pip wheel -q --no-deps -w wheel dist/ortmodule-*.tar.gz
[ ! -e clone/.venv ] && [ ! -e clone/build/gen ]

"$py" -m venv --without-pip env
ours=$(env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$py" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("site-packages")))' > "$ours/theirs.pth"
"$py" -m pip --python env/bin/python install -q --no-deps --no-index wheel/ortmodule-*.whl
cp "$root/tests/wheel/step.py" "$tmp/"
mkdir empty && cd empty
OMP_NUM_THREADS=1 ../env/bin/python ../step.py
