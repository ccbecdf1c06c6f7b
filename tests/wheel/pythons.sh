#!/usr/bin/env bash
# Which Pythons, which PyTorch does the wheel work with? Each line is something that was run here; what cannot be had is a line that says so.
#   tests/wheel/pythons.sh .venv/bin/python [wheel]       TORCHES="2.11.0 2.12.1" PYTHONS="..." DEBIAN=forky
# Needs a package index for: the judges (abi3audit, auditwheel, vermin), numpy for other Pythons, Python files of older PyTorch (about 85 MB each).
# With DEBIAN=forky, as root and with debootstrap: Debian's own Python and PyTorch of that release, in a directory of its own (about 1.5 GB, build/pythons/forky).
set -uo pipefail
py=$(realpath -s "$1") root=$(cd "$(dirname "$0")/../.." && pwd) here=${PYTHONS_DIR:-$root/build/pythons}
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONDONTWRITEBYTECODE=1
unset PYTHONPATH MAKEFLAGS MFLAGS MAKELEVEL
mkdir -p "$here" && cd "$here"
failed=0
say() { printf '%-28s %s\n' "$1" "$2"; }
bad() { say "$1" "FAILED: $2"; failed=1; }

wheel=${2:-}
if [ -z "$wheel" ]; then
    rm -rf dist && mkdir dist
    (cd "$root" && KB="$root/build" OWN= "$py" -m pip wheel -q --no-deps --no-build-isolation -w "$here/dist" .) > wheel.log 2>&1 || { cat wheel.log; exit 1; }
    "$py" "$root/tests/wheel/audit.py" --tag dist/*.whl || exit 1
    wheel=$(ls "$here"/dist/*.whl)
fi
wheel=$(realpath "$wheel")

# --- symbols: nothing outside of Python 3.10's stable interface, nothing of a newer glibc
[ -x judges/bin/python ] || "$py" -m venv judges
if judges/bin/python -m pip install -q abi3audit auditwheel vermin > judges.log 2>&1; then
    out=$(judges/bin/abi3audit -v -s "$wheel" 2>&1 | tr -s ' \n' ' ')
    case $out in *" 0 ABI version mismatches and 0 ABI violations"*) say abi3audit "no symbol outside of the stable interface of 3.10" ;; *) bad abi3audit "$out" ;; esac
    out=$(judges/bin/auditwheel show "$wheel" 2>&1 | tr -s ' \n' ' ')
    case $out in *'platform tag: "manylinux_2_'*) say auditwheel "$(grep -oE 'platform tag: "[^"]*"' <<< "$out" | head -1)" ;; *) bad auditwheel "$out" ;; esac
    out=$(judges/bin/vermin --no-tips -t=3.10- "$root/ortmodule" "$root/optim" 2>&1 | grep "^Minimum")
    case $out in *"versions: 3.10"*) say vermin "$out" ;; *) bad vermin "$out" ;; esac
else
    say judges "skipped: abi3audit, auditwheel and vermin cannot be had ($(tail -1 judges.log))"
fi

# --- other Pythons: load, compile, tell a try from bytecode, train with numpy alone; everything where they have torch
[ -f digits/training_model.onnx ] || PYTHONPATH="$root" "$py" "$root/examples/digits.py" digits > digits.log 2>&1 || { cat digits.log; exit 1; }
want=""
for v in 3.10 3.11 3.12 3.13 3.14; do
    other=""
    for c in ${PYTHONS:-} $(type -P python$v) "$HOME"/.pyenv/versions/$v.*/bin/python; do
        [ -x "$c" ] && [ "$("$c" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = $v ] && other=$c && break
    done
    [ -n "$other" ] || { say "python $v" "skipped: not on this machine (PYTHONS=\"/path/to/python ...\")"; continue; }
    [ -x env$v/bin/python ] || "$other" -m venv env$v > venv.log 2>&1 || { say "python $v" "skipped: no venv: $(tail -1 venv.log)"; continue; }
    env$v/bin/python -m pip install -q numpy > numpy.log 2>&1 || { say "python $v" "skipped: no numpy for it: $(tail -1 numpy.log)"; continue; }
    env$v/bin/python -m pip install -q --no-deps --no-index --force-reinstall "$wheel" > install.log 2>&1 || { bad "python $v" "$(cat install.log)"; continue; }
    got=$(env$v/bin/python "$root/tests/wheel/alone.py" digits "$root/examples/digits.u8" 2> alone.log) || { bad "python $v" "$(tail -3 alone.log)"; continue; }
    [ -n "$want" ] || want=$got
    [ "$got" = "$want" ] && say "python $v" "$(env$v/bin/python -V 2>&1): $(tail -1 alone.log), the same bits" || bad "python $v" "other losses: $got"
done

# --- older PyTorch: its Python files on the libraries of the one that is installed (older_torch.py says what that shows)
for v in ${TORCHES-2.11.0 2.12.1}; do
    tag=$("$py" -c 'import sys; print("%d%d" % sys.version_info[:2])')
    if [ ! -f torch-$v/laid ]; then
        for p in macosx_14_0_arm64 macosx_11_0_arm64; do
            "$py" -m pip download -q --no-deps --platform $p --python-version $tag --only-binary=:all: -d wheels torch==$v > torch.log 2>&1 && break
        done
        ls wheels/torch-$v-*.whl > /dev/null 2>&1 || { say "torch $v" "skipped: no wheel of it can be had: $(tail -1 torch.log)"; continue; }
        rm -rf torch-$v && mkdir torch-$v && "$py" "$root/tests/wheel/older_torch.py" wheels/torch-$v-*.whl torch-$v && touch torch-$v/laid
    fi
    PYTHONPATH="$here/torch-$v:$root" "$py" -m ortmodule.selftest > selftest-$v.log 2>&1 || { bad "torch $v" "$(grep failed selftest-$v.log)"; continue; }
    names=$(PYTHONPATH="$here/torch-$v:$root" "$py" "$root/tests/wheel/private_names.py" wheels/torch-$v-*.whl) && say "torch $v" "$names" || bad "torch $v" "$names"
    say "torch $v" "its Python files on the libraries of $("$py" -c 'import torch; print(torch.__version__)'): $(tail -1 selftest-$v.log)"
done

# --- Debian's own Python and PyTorch
if [ -n "${DEBIAN:-}" ]; then
    d=$here/$DEBIAN
    if [ ! -f "$d/.ready" ]; then
        command -v debootstrap > /dev/null && [ "$(id -u)" = 0 ] || { say "debian $DEBIAN" "skipped: debootstrap and root are needed"; exit $failed; }
        script=$DEBIAN; [ -e /usr/share/debootstrap/scripts/$DEBIAN ] || script=/usr/share/debootstrap/scripts/sid
        { debootstrap --variant=minbase --include=ca-certificates,python3 "$DEBIAN" "$d" http://deb.debian.org/debian ${script##"$DEBIAN"} &&
          chroot "$d" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-torch python3-onnx python3-numpy &&
          touch "$d/.ready"; } > debian.log 2>&1 || { say "debian $DEBIAN" "skipped: $(tail -1 debian.log)"; exit $failed; }
    fi
    cp "$wheel" "$root/tests/wheel/alone.py" "$root/examples/digits.u8" "$d/tmp/" && cp -r digits "$d/tmp/"
    chroot "$d" bash -c 'rm -rf /tmp/site && python3 -m zipfile -e /tmp/'"$(basename "$wheel")"' /tmp/site && cd /tmp && export PYTHONPATH=/tmp/site OMP_NUM_THREADS='"$OMP_NUM_THREADS"' &&
        python3 alone.py digits digits.u8 > alone.out && python3 -m ortmodule.selftest' > debian-selftest.log 2>&1 || { bad "debian $DEBIAN" "$(tail -3 debian-selftest.log)"; exit 1; }
    [ -z "$want" ] || [ "$(cat "$d/tmp/alone.out")" = "$want" ] || bad "debian $DEBIAN" "other losses"
    say "debian $DEBIAN" "$(chroot "$d" python3 -c 'import sys, torch; print("python %d.%d.%d, torch" % sys.version_info[:3], torch.__version__)'): $(tail -1 debian-selftest.log), the same bits"
else
    say debian "skipped: DEBIAN=forky was not given"
fi
exit $failed
