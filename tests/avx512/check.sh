#!/bin/bash
# Runs tests on a CPU with AVX-512 that this machine need not have: Bochs emulates one, a Debian kernel boots on it, this checkout and
# its virtual environment are the root file system. See README.md.
#
#   tests/avx512/check.sh tests/ops tests/optim/test_kernels.py        (anything pytest takes)
#
# Exit status: pytest's; 2 when something is missing here or the machine inside did not come up.
set -euo pipefail
TOP=$(cd "$(dirname "$0")/../.." && pwd)
HOME_DIR=$TOP/build/avx512       # everything downloaded, built and booted; nothing outside is written
CPU=${CPU:-corei7_skylake_x}     # has exactly what the kernels ask for: F, BW, CD, DQ, VL
SOURCE=bochs_3.0+dfsg.orig.tar.xz
SOURCE_SHA256=78f6c73d4a6472d5130a87ab9dc306d02c7c71ed8e25b3a8ef642e2a7acd282b
MIRROR=${MIRROR:-http://deb.debian.org/debian}
PACKAGES="bochsbios vgabios isolinux syslinux-common xorriso libisoburn1 libburn4 libisofs6 libjte2 busybox-static"

stop() { echo "avx512: $*" >&2; exit 2; }
say() { echo "avx512: $*"; }

[ "$(uname -m)" = x86_64 ] || stop "the AVX-512 kernels are built on x86_64 only"
for tool in apt-get dpkg-deb curl xz make g++ mke2fs flock; do
    PATH=$PATH:/usr/sbin command -v $tool >/dev/null || stop "needs $tool: Debian packages apt dpkg curl xz-utils make g++ e2fsprogs"
done
[ -f "$TOP/build/libom.so" ] && [ -x "$TOP/.venv/bin/python" ] || stop "build first: make build lib"
grep -qw avx512vl /proc/cpuinfo && say "this machine has AVX-512 itself: 'make test' runs these kernels without an emulator"
mkdir -p "$HOME_DIR"
cd "$HOME_DIR"
exec 9>in_use
flock -n 9 || stop "another run uses $HOME_DIR: wait for it"

# --- what the machine is made of: unpacked, not installed ------------------------------------------------------------
if [ ! -f unpacked ]; then
    kernel=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p')
    [ -n "$kernel" ] || stop "apt knows no linux-image-cloud-amd64: run apt-get update, on Debian"
    say "downloading $kernel $PACKAGES"
    rm -rf debs debian && mkdir debs debian
    (cd debs && apt-get download -qq $kernel $PACKAGES 2>&1 | grep -v unsandboxed || true)
    for p in $kernel $PACKAGES; do ls debs/"${p}"_*.deb >/dev/null 2>&1 || stop "apt-get download $p failed"; done
    for p in debs/*.deb; do dpkg-deb -x "$p" debian; done
    touch unpacked
fi

BOCHS=${BOCHS:-$HOME_DIR/bochs-3.0/bochs}
if [ ! -x "$BOCHS" ]; then
    say "building Bochs 3.0 from Debian's source (about four minutes)"
    curl -fsSL -o bochs.tar.xz "$MIRROR/pool/main/b/bochs/$SOURCE" || stop "cannot fetch $SOURCE from $MIRROR: set MIRROR, or BOCHS to a bochs built with --enable-evex --with-nogui"
    echo "$SOURCE_SHA256  bochs.tar.xz" | sha256sum -c --status || stop "$SOURCE is not the archive expected"
    tar xf bochs.tar.xz
    (cd bochs-3.0 && CFLAGS=-O2 CXXFLAGS='-O2 -march=native' ./configure --with-nogui --enable-cpu-level=6 --enable-x86-64 --enable-avx --enable-evex \
        --enable-all-optimizations --enable-fpu --enable-pci --enable-memtype --disable-debugger --disable-docbook --disable-plugins &&
        make -j"$(nproc)") >bochs.build 2>&1 || stop "Bochs did not build: see $HOME_DIR/bochs.build"
fi
"$BOCHS" -help cpu 2>&1 | grep -x "$CPU" >/dev/null || stop "$BOCHS has no CPU model $CPU"

# --- kernel, disk driver and boot loader: a CD ------------------------------------------------------------------------------
if [ ! -f boot.iso ] || [ "$TOP/tests/avx512/init.sh" -nt boot.iso ]; then
    rm -rf cd initrd && mkdir -p cd/isolinux initrd/{bin,mod,proc,sys,dev,root}
    for m in scsi_common scsi_mod sd_mod libata ata_piix; do
        find debian/lib/modules -name "$m.ko*" -exec cp {} initrd/mod/ \;
    done
    cp debian/bin/busybox initrd/bin/
    cp "$TOP/tests/avx512/init.sh" initrd/init && chmod +x initrd/init
    (cd initrd && find . | bin/busybox cpio -o -H newc 2>/dev/null) >cd/initrd
    cp debian/boot/vmlinuz-* cd/vmlinuz
    cp debian/usr/lib/ISOLINUX/isolinux.bin debian/usr/lib/syslinux/modules/bios/ldlinux.c32 cd/isolinux/
    cat >cd/isolinux/isolinux.cfg <<'END'
DEFAULT check
LABEL check
KERNEL /vmlinuz
INITRD /initrd
APPEND console=ttyS0,115200 mitigations=off nosmp tsc=reliable random.trust_cpu=on panic=-1 loglevel=3
END
    LD_LIBRARY_PATH=debian/usr/lib/x86_64-linux-gnu debian/usr/bin/xorriso -as mkisofs -quiet -o boot.iso.part -b isolinux/isolinux.bin -c isolinux/boot.cat \
        -no-emul-boot -boot-load-size 4 -boot-info-table cd 2>/dev/null
    mv boot.iso.part boot.iso
    rm -rf cd initrd
fi

# --- disk 1: Python, its environment (as /venv) and the libraries they load. Made anew when the environment's requirements are newer ---------
disk() { truncate -s $(($(du -sm "$1" | cut -f1) * 5 / 4 + 50))M "$2" && PATH=$PATH:/usr/sbin mke2fs -q -F -t ext4 -O ^has_journal -m 0 -d "$1" "$2"; }
if [ ! -f system.img ] || [ "$TOP/requirements.txt" -nt system.img ]; then
    say "making the disk with Python and PyTorch (2 GB)"
    rm -rf root system.img && mkdir -p root/{bin,scratch,checkout,venv,dev,proc,sys,etc,tmp}
    cp debian/bin/busybox root/bin/
    python=$(readlink -f "$TOP/.venv/bin/python")
    stdlib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    tar -C / --exclude="${stdlib#/}/test" --exclude='*/site-packages/*' --exclude='*/dist-packages' --exclude='*.a' -cf - "${python#/}" "${stdlib#/}" | tar -C root -xf -
    tar -C "$TOP/.venv/" --exclude='torch/include' --exclude='torch/test' --exclude='torch/bin/*test*' --exclude='torch/bin/protoc*' --exclude='*.a' -cf - . |
        tar -C root/venv -xf -
    ln -sfn "$python" root/venv/bin/python # a chain of links outside, not all of it packed
    find root -type f \( -name '*.so' -o -name '*.so.*' -o -path "root$python" \) -exec ldd {} + 2>/dev/null |
        sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p; s/^\t\(\/[^ ]*\) .*/\1/p' | sort -u | while read -r lib; do
        case $lib in "$HOME_DIR"/*) continue ;; esac
        [ -e "root$lib" ] || { mkdir -p "root${lib%/*}" && cp -L "$lib" "root$lib"; }
    done
    disk root system.img.part && mv system.img.part system.img
    rm -rf root
fi

# --- disk 2: the checkout as it is built now, and what to run -----------------------------------------------------------
rm -rf work work.img && mkdir -p work/build
cp -a "$TOP"/{csrc,docs,examples,optim,ortmodule,tests,pyproject.toml} work/
cp -a "$TOP"/build/{libom.so,om-opt,om-alloc} work/build/
ln -s /venv work/.venv
{ printf 'set --'; printf ' %q' "${@:-tests/ops}"; echo; cat "$TOP/tests/avx512/guest.sh"; } >work/guest.sh
disk work work.img
rm -rf work

cat >machine <<END
cpu: model=$CPU, count=1, ips=100000000
memory: guest=2048, host=2048
romimage: file=$HOME_DIR/debian/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=$HOME_DIR/debian/usr/share/vgabios/vgabios.bin
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=disk, path=$HOME_DIR/system.img, mode=flat
ata0-slave: type=disk, path=$HOME_DIR/work.img, mode=flat
ata1: enabled=1, ioaddr1=0x170, ioaddr2=0x370, irq=15
ata1-master: type=cdrom, path=$HOME_DIR/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$HOME_DIR/console
clock: sync=none
log: $HOME_DIR/bochs.log
panic: action=fatal
display_library: nogui
END

# --- the run -----------------------------------------------------------------------------------------------------------------
say "booting (a minute); a test takes some sixty times as long as outside"
: >console
rm -f ./*.lock # of a machine that was killed
"$BOCHS" -q -f machine </dev/null >bochs.out 2>&1 &
machine=$!
trap 'kill "$machine" 2>/dev/null || true' EXIT
tail -n +1 -f --pid=$machine console
wait $machine || true
status=$(tr -d '\r' <console | sed -n 's/^avx512: status //p' | tail -1)
[ -n "$status" ] || stop "the machine stopped before the tests were through: see $HOME_DIR/console and bochs.log"
exit "$status"
