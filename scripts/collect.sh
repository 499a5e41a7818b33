#!/bin/sh
# Capture what `regrepro audit --from FOLDER` reads, on a machine where nothing is installed.
#
#   sh collect.sh [FOLDER]        default: ./regrepro-collect-<host>
#
# Plain POSIX sh with cat, mkdir, ls, sed and readlink. Reads only; root sees more (page blocks, kernel log, PCI
# capabilities), and is not needed. The folder has the shape of the machine: proc/…, sys/…, etc/…, and
# commands/<name>.txt with outputs. links.txt holds "<path><TAB><target>" for symbolic links, denied.txt the
# files that could not be read.
# Send it as it is, or as an archive: tar czf NAME.tar.gz FOLDER

set -u
LC_ALL=C
export LC_ALL
host=$(cat /proc/sys/kernel/hostname 2>/dev/null || echo node)
out=${1:-./regrepro-collect-$host}
case $out in
    -h | --help)
        sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    -*)
        echo "usage: sh collect.sh [FOLDER]" >&2
        exit 2
        ;;
esac
if [ -e "$out" ]; then
    echo "collect.sh: $out exists already: name another folder" >&2
    exit 2
fi
umask 077
mkdir -p "$out/commands" || exit 2
: >"$out/links.txt"
: >"$out/denied.txt"
{
    echo "regrepro-collect 1"
    echo "uid $(id -u 2>/dev/null || echo unknown)"
    echo "date $(date -u +%Y-%m-%dT%H:%M:%SZ 2>/dev/null)"
} >"$out/collect.txt"

# copy PATH...: each file as it is, where it can be read.
copy() {
    for f in "$@"; do
        [ -f "$f" ] || continue
        [ -d "$out${f%/*}" ] || mkdir -p "$out${f%/*}"
        if cat "$f" >"$out$f" 2>/dev/null; then :; else
            rm -f "$out$f"
            echo "$f" >>"$out/denied.txt"
        fi
    done
}

# link PATH...: where a symbolic link leads.
link() {
    for f in "$@"; do
        [ -L "$f" ] || continue
        printf '%s\t%s\n' "$f" "$(readlink "$f" 2>/dev/null)" >>"$out/links.txt"
    done
}

# have NAME: is there such a command?
have() { command -v "$1" >/dev/null 2>&1; }

# output NAME COMMAND...: its output, at most 30 seconds where `timeout` is there.
output() {
    name=$1
    shift
    have "$1" || return 0
    if have timeout; then
        timeout 30 "$@" >"$out/commands/$name.txt" 2>&1 </dev/null
    else
        "$@" >"$out/commands/$name.txt" 2>&1 </dev/null
    fi
    rc=$?
    [ $rc -eq 0 ] || echo "commands/$name.txt exit status $rc" >>"$out/denied.txt"
}

# The kernel and its memory.
copy /proc/cmdline /proc/meminfo /proc/zoneinfo /proc/pagetypeinfo /proc/buddyinfo /proc/vmstat /proc/cpuinfo \
    /proc/modules /proc/version /proc/iomem /proc/mounts /proc/sys/kernel/osrelease /proc/sys/kernel/version \
    /proc/sys/kernel/hostname /proc/sys/kernel/arch /proc/sys/kernel/tainted /proc/sys/kernel/kptr_restrict \
    /proc/sys/kernel/perf_event_paranoid /proc/sys/kernel/unprivileged_bpf_disabled /proc/sys/kernel/dmesg_restrict
copy /proc/pressure/memory /proc/pressure/cpu /proc/pressure/io
for f in overcommit_memory overcommit_ratio min_free_kbytes max_map_count compaction_proactiveness \
    compact_unevictable_allowed zone_reclaim_mode swappiness unprivileged_userfaultfd nr_hugepages \
    watermark_scale_factor extfrag_threshold; do
    copy "/proc/sys/vm/$f"
done
copy /sys/kernel/mm/transparent_hugepage/enabled /sys/kernel/mm/transparent_hugepage/defrag \
    /sys/kernel/mm/transparent_hugepage/shmem_enabled /sys/kernel/security/lockdown
copy /sys/kernel/mm/hugepages/*/nr_hugepages /sys/kernel/mm/hugepages/*/free_hugepages
copy /sys/kernel/mm/cma/*/* /sys/kernel/debug/cma/*/* /sys/kernel/debug/kho/out/* /sys/kernel/debug/kho/in/*
copy /sys/devices/system/node/node*/meminfo /sys/devices/system/node/node*/distance \
    /sys/devices/system/node/node*/cpulist
copy /sys/devices/system/node/online /sys/devices/system/memory/block_size_bytes
copy /proc/device-tree/reserved-memory/*/compatible /proc/device-tree/reserved-memory/*/reusable \
    /proc/device-tree/reserved-memory/*/size /proc/device-tree/reserved-memory/*/linux,cma-default
release=$(cat /proc/sys/kernel/osrelease 2>/dev/null)
copy "/boot/config-$release" "/lib/modules/$release/config" /proc/config.gz
copy /etc/os-release

# Limits and confinement: this shell, the service manager, and processes that hold an RDMA device open.
mkdir -p "$out/proc/self" && cat /proc/self/limits >"$out/proc/self/limits" 2>/dev/null
cat /proc/self/status >"$out/proc/self/status" 2>/dev/null
cat /proc/self/cgroup >"$out/proc/self/cgroup" 2>/dev/null
copy /proc/1/limits /proc/1/cgroup /run/systemd/container
copy /etc/systemd/system.conf /etc/systemd/system.conf.d/* /etc/security/limits.conf /etc/security/limits.d/*
for c in "" $(sed -n 's/^0:://p' /proc/self/cgroup 2>/dev/null); do
    copy "/sys/fs/cgroup$c/memory.max" "/sys/fs/cgroup$c/memory.high" "/sys/fs/cgroup$c/memory.current" \
        "/sys/fs/cgroup$c/rdma.max" "/sys/fs/cgroup$c/memory.events"
done
[ -e /.dockerenv ] && : >"$out/.dockerenv"
# One `ls` for all: "/proc/PID/fd:" lines, then the descriptors. The names are numbers.
# shellcheck disable=SC2012
holders=$(ls -l /proc/[0-9]*/fd 2>/dev/null |
    sed -n -e 's,^/proc/\([0-9]*\)/fd:$,\1,;t keep' -e 's,^.* \([0-9]*\) -> \(/dev/infiniband/uverbs.*\)$,= \1 \2,p' \
        -e d -e ':keep' -e p)
pid=
seen=
printf '%s\n' "$holders" | while read -r a b c; do
    if [ "$a" != "=" ]; then
        pid=$a
        continue
    fi
    printf '/proc/%s/fd/%s\t%s\n' "$pid" "$b" "$c" >>"$out/links.txt"
    [ "$seen" = "$pid" ] && continue
    seen=$pid
    copy "/proc/$pid/limits" "/proc/$pid/status" "/proc/$pid/cgroup" "/proc/$pid/comm"
done

# NVIDIA.
copy /proc/driver/nvidia/version /proc/driver/nvidia/params /proc/driver/nvidia/gpus/*/information
for m in nvidia nvidia_uvm nvidia_peermem nv_peer_mem mlx5_core mlx5_ib ib_core ib_uverbs mlx_compat rdma_rxe siw \
    irdma bnxt_re efa ib_peer_mem gdrdrv; do
    copy "/sys/module/$m/version" "/sys/module/$m/srcversion" "/sys/module/$m/taint" "/sys/module/$m/refcnt" \
        "/sys/module/$m"/parameters/*
    [ -d "/sys/module/$m" ] && [ ! -d "$out/sys/module/$m" ] && mkdir -p "$out/sys/module/$m" &&
        : >"$out/sys/module/$m/refcnt"
done
copy /sys/kernel/mm/memory_peers/*/*
ls /sys/module >"$out/commands/sys-module.txt" 2>/dev/null
for d in /usr/src/nvidia* /var/lib/dkms/nvidia*/* /usr/src/ofa_kernel*; do
    [ -d "$d" ] && echo "$d" >>"$out/commands/driver-folders.txt"
done
for f in /usr/src/nvidia*/nvidia/os-mlock.c /usr/src/nvidia*/nvidia-peermem/nvidia-peermem.c \
    /usr/src/nvidia*/common/inc/nv-mm.h /usr/src/nvidia*/dkms.conf; do
    copy "$f"
done
copy /usr/local/cuda/version.json /usr/local/cuda/version.txt
for f in /usr/lib/*/libcuda.so.[0-9]*.* /usr/lib64/libcuda.so.[0-9]*.*; do
    [ -e "$f" ] && echo "$f" >>"$out/commands/libcuda.txt"
done
grep -E ' (.*reg_user_mr_dmabuf|ib_umem_dmabuf_get|nvidia_p2p_(get|put)_pages(_persistent)?|nv_mem_get_pages_nc|__gup_longterm_locked|migrate_longterm_unpinnable_[a-z]*|check_and_migrate_[a-z_]*|pin_user_pages_fast)(\.[a-z0-9.]*)?([[:space:]]|$)' \
    /proc/kallsyms >"$out/commands/kallsyms.txt" 2>/dev/null

# RDMA.
for d in /sys/class/infiniband/*; do
    [ -e "$d" ] || continue
    link "$d" "$d/device" "$d/device/driver" "$d/device/driver/module" "$d/device/iommu_group"
    copy "$d/node_type" "$d/fw_ver" "$d/hca_type" "$d/board_id" "$d/node_guid" "$d/parent"
    for p in "$d"/ports/*; do
        copy "$p/state" "$p/phys_state" "$p/rate" "$p/link_layer" "$p/gid_attrs/types/0"
    done
    copy "$d/device/vendor" "$d/device/device" "$d/device/numa_node" "$d/device/current_link_speed" \
        "$d/device/current_link_width"
    b=$(readlink "$d/device" 2>/dev/null)
    [ -n "$b" ] && ls "$d/device/net" 2>/dev/null >"$out/commands/netdev-${d##*/}.txt"
done

# PCI topology: NVIDIA GPUs, RDMA devices and the bridges above them.
for d in /sys/bus/pci/devices/*; do
    [ -e "$d/class" ] || continue
    read -r class <"$d/class" || class=
    read -r vendor <"$d/vendor" || vendor=
    case $class in 0x0604*) ;; 0x0207* | 0x0200* | 0x0280*) ;;
        *) [ "$vendor" = 0x10de ] || continue ;;
    esac
    link "$d" "$d/driver" "$d/iommu_group"
    copy "$d/class" "$d/vendor" "$d/device" "$d/numa_node" "$d/resource" "$d/config"
done
for g in /sys/kernel/iommu_groups/*; do copy "$g/type"; done
for g in /sys/class/iommu/*; do link "$g"; done

output dmesg dmesg
output uname uname -a
output getconf getconf PAGESIZE
output ulimit sh -c 'ulimit -a'
output nvidia-smi nvidia-smi -q
output rdma-resource rdma resource show
output rdma-link rdma link show
output ibv_devinfo ibv_devinfo -v
output ofed_info ofed_info -s
output systemctl-memlock systemctl show --property DefaultLimitMEMLOCK --property DefaultLimitMEMLOCKSoft
output lspci lspci -nn

echo "$out: $(find "$out" -type f 2>/dev/null | wc -l) files"
[ -s "$out/denied.txt" ] && echo "not readable (root sees more): $(wc -l <"$out/denied.txt") files, see $out/denied.txt"
exit 0
