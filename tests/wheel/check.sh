#!/usr/bin/env bash
# A clean clone becomes an sdist, the sdist a wheel (in pip's own build environment, nothing of .venv), the wheel is installed in a new environment and
# trains there, outside any checkout; then a newcomer's first steps. torch is not downloaded again: the new environment sees the packages of the Python given, but not the checkout.
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
[ ! -d "$root/build/cpu/kernels" ] || export KB="$root/build" OWN=
"$py" -m pip wheel -q --no-deps -w wheel dist/ortmodule-*.tar.gz
[ ! -e clone/.venv ] && [ ! -e clone/build/gen ]
"$py" "$root/tests/wheel/audit.py" wheel/ortmodule-*.whl

"$py" -m venv --without-pip env
ours=$(env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$py" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("site-packages")))' > "$ours/theirs.pth"
"$py" -m pip --python env/bin/python install -q --no-deps --no-index wheel/ortmodule-*.whl
cp "$root/tests/wheel/step.py" "$tmp/"
# the quickstart by copy and paste in an empty directory: its Python from the wheel, all of it from the sources
blocks() { sed -n "/^\`\`\`$1\$/,/^\`\`\`\$/p" "$root/docs/guide/quickstart.md" | grep -v '^```'; }
export OMP_NUM_THREADS=1
mkdir empty && cd empty
../env/bin/python ../step.py
../env/bin/python -m ortmodule.selftest
blocks python > train.py && ../env/bin/python train.py

cd "$tmp" && "$py" -m venv env2 && cp "$ours/theirs.pth" "${ours/env/env2}/"
cd clone && export PATH="$tmp/env2/bin:$PATH"
said=$(python -m ortmodule.info 2>&1)   # in the clone, before anything is built
[[ $said == *"Start it in another directory"* ]] || { echo "$said"; exit 1; }
blocks sh > ../install.sh
echo 'python train.py' | cat ../install.sh - > ../all.sh
mkdir ../first-steps && cp ../empty/train.py ../first-steps/
bash -e ../all.sh > ../newcomer.log 2>&1 || { cat ../newcomer.log; exit 1; }
grep -q "$tmp/env2/lib.*_C.abi3.so" ../newcomer.log && grep -q 'checks hold' ../newcomer.log && tail -1 ../newcomer.log
