# Runs inside the emulated machine; check.sh puts pytest's arguments in front. Eager PyTorch, the other side of every comparison, is kept off
# the instructions under test.
cd /checkout
export PATH=/bin HOME=/scratch TMPDIR=/scratch PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PYTHONPATH=$PWD OMP_NUM_THREADS=1
export ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
B=/bin/busybox
$B ifconfig lo 127.0.0.1 up
isa=$(.venv/bin/python -c 'import ctypes
lib = ctypes.CDLL("build/libom.so")
lib.om_isa_text.restype = ctypes.c_char_p
print(lib.om_isa_text().decode())')
echo "avx512: the engine chooses its $isa kernels"
if [ "$isa" = avx512 ]; then
    .venv/bin/python -m pytest -p no:cacheprovider -q --color=no --tb=short --durations=5 "$@"
    echo "avx512: status $?"
fi
$B poweroff -f
