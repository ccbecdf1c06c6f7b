#!/bin/busybox sh
# First program of the emulated machine: loads the disk driver, mounts the disk with Python as root and the one with the
# checkout on /checkout, runs /checkout/guest.sh. Neither is written.
B=/bin/busybox
$B mount -t proc p /proc
$B mount -t sysfs s /sys
$B mount -t devtmpfs d /dev
for round in 1 2 3 4 5; do # in the order of their needs, found by trying
    for m in /mod/*.ko; do $B insmod "$m" 2>/dev/null; done
done
n=0
while [ ! -b /dev/sdb ] && [ $n -lt 100 ]; do $B sleep 0.1; n=$((n + 1)); done
if $B mount -t ext4 -o ro /dev/sda /root && $B mount -t ext4 -o ro /dev/sdb /root/checkout; then
    $B mount -t tmpfs t /root/scratch
    for d in dev proc sys; do $B mount --move /$d /root/$d; done
    exec $B switch_root /root /bin/busybox sh /checkout/guest.sh
fi
$B dmesg | $B tail -n 40
$B poweroff -f
