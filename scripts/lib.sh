# shellcheck shell=bash
# shellcheck disable=SC2034 # the lists of packages are for the scripts that source this
# Shared by the scripts beside it: brings a checkout on Debian 12, Debian 13 or a relative of theirs to where
# `.venv/bin/regrepro` works. Sourced, never run. Every step looks first and does only what is missing, so that the
# second run takes about a second. It uses apt and pip as this machine has them configured.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=$ROOT/.cache
VENV=$ROOT/.venv
# The distribution's interpreter: python3-pyverbs is built for this one and for no other.
PYTHON=/usr/bin/python3

# Each argument is a line.
say() { printf '%s\n' "$@"; }
warn() { printf '%s\n' "$@" >&2; }
# die SENTENCE [EXIT CODE]
die() {
	printf '%s: %s\n' "${0##*/}" "$1" >&2
	exit "${2:-2}"
}

# Run a command with its output in a log file; show the end of the log when it fails.
# logged LOG COMMAND...
logged() {
	local log=$1
	shift
	mkdir -p "${log%/*}"
	if ! "$@" >"$log" 2>&1 </dev/null; then
		warn "--- the last lines of $log"
		tail -n 20 "$log" >&2
		return 1
	fi
}

# The package that carries QEMU's full-system emulator of this machine's own architecture.
qemu_package() {
	case $(uname -m) in
	x86_64) echo qemu-system-x86 ;;
	aarch64) echo qemu-system-arm ;;
	*) die "the lab knows x86-64 and arm64, and this machine is $(uname -m)" ;;
	esac
}

# What `regrepro run` needs to be built and to run: a compiler for the C core, and the verbs library with its
# providers; python3-pyverbs is the second, independent registrar.
BUILD_PACKAGES=(ca-certificates gcc libc6-dev python3 python3-dev python3-venv)
VERBS_PACKAGES=(ibverbs-providers libibverbs1 python3-pyverbs)
# What the lab needs beside them, on the host and, since the guest runs on the host's file system, in the guest: the
# initramfs is made of a static busybox; kmod, iproute2 (with `rdma`) and udev set the guest up; apt and dpkg fetch
# and unpack kernels, and the keyring is what they are verified with.
lab_packages() {
	echo "$(qemu_package)" busybox-static file kmod iproute2 udev apt dpkg libarchive-tools zstd debian-archive-keyring
}
# What the checks of scripts/test and the baselines of scripts/bench need. What `regrepro watch` is built with: libbpf
# and what it needs, to be linked in. The lab's tests run programs of others beside ours.
LINT_PACKAGES=(cppcheck shellcheck)
WATCH_PACKAGES=(libbpf-dev libelf-dev zlib1g-dev libzstd-dev)
OTHERS_PACKAGES=(bpftrace git ibverbs-utils perftest runc systemd)
# A Slurm of the tests' own, for docs/gates.md: they start its daemons, in namespaces. Where systemd runs, Debian
# starts a munged of its own at installation; slurmd and slurmctld wait for a configuration that nobody writes.
SLURM_PACKAGES=(munge slurm-client slurm-wlm-basic-plugins slurmctld slurmd iproute2)
BENCH_PACKAGES=(gcc libc6-dev libibverbs-dev)

# Print those of the named packages that are not installed.
missing_packages() {
	local have
	have=" $(dpkg-query -W -f '${db:Status-Status}/${Package} ' "$@" 2>/dev/null || true)"
	local package
	for package in "$@"; do
		[[ $have == *" installed/$package "* ]] || echo "$package"
	done
}

as_root() {
	if [[ $EUID -eq 0 ]]; then
		"$@"
	else
		sudo "$@"
	fi
}

# Whatever this machine's apt allows (a source that is marked trusted stays what it is).
SIGNED_ONLY=(-o Acquire::AllowInsecureRepositories=false -o Acquire::AllowWeakRepositories=false
	-o Acquire::AllowDowngradeToInsecureRepositories=false -o APT::Get::AllowUnauthenticated=false)
apt_install() {
	as_root env DEBIAN_FRONTEND=noninteractive apt-get "${SIGNED_ONLY[@]}" install -y -q --no-install-recommends "$@"
}

# Install what is missing of the named packages.
need_packages() {
	if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
		die "this set-up installs Debian packages, and there is no apt here; with the counterparts of: $* installed, \`pip install .[lab,views]\` in a virtual environment does the rest"
	fi
	local missing
	mapfile -t missing < <(missing_packages "$@")
	((${#missing[@]})) || return 0
	if [[ $EUID -ne 0 ]] && ! command -v sudo >/dev/null; then
		die "${#missing[@]} packages are missing and this is neither root nor is there sudo; as root: apt-get install --no-install-recommends ${missing[*]}"
	fi
	say "Installing ${#missing[@]} packages: ${missing[*]}"
	# The package lists may be absent (a fresh system) or older than the archive (the download then fails).
	if apt-cache show "${missing[@]}" >/dev/null 2>&1 && logged "$CACHE/apt.log" apt_install "${missing[@]}" 2>/dev/null; then
		return 0
	fi
	logged "$CACHE/apt-update.log" as_root apt-get "${SIGNED_ONLY[@]}" update -q || die "apt-get update failed (above): is the network up?"
	logged "$CACHE/apt.log" apt_install "${missing[@]}" || die "apt-get could not install the packages (above)"
}

# A digest of all that the installed package depends on, except the Python code, which is read where it lies.
sources_digest() {
	(
		cd "$ROOT"
		"$PYTHON" --version
		find pyproject.toml setup.py csrc -type f \( -name '*.[ch]' -o -name '*.py' -o -name '*.toml' \) -print0 |
			LC_ALL=C sort -z | xargs -0 sha256sum
	) | sha256sum | cut -d ' ' -f 1
}

# Make .venv and install the package into it, editable, with the named extras.
# need_venv EXTRA...
need_venv() {
	"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
		die "regrepro needs Python 3.10 or later, and $PYTHON is $("$PYTHON" --version 2>&1)"
	local stamp=$VENV/regrepro-installed digest
	digest=$(sources_digest)
	# Without the system's packages in sight there would be no pyverbs; running venv again mends a half-made one too.
	if ! "$VENV/bin/python" -c 'import pip' 2>/dev/null ||
		! grep -qs '^include-system-site-packages = true' "$VENV/pyvenv.cfg"; then
		say "Making the virtual environment .venv"
		logged "$CACHE/venv.log" "$PYTHON" -m venv --system-site-packages "$VENV" || die "the virtual environment could not be made (above)"
		rm -f "$stamp"
	fi
	local have=() extra
	if [[ -f $stamp ]]; then
		read -r -a have <"$stamp"
	fi
	if [[ ${have[0]-} == "$digest" && -x $VENV/bin/regrepro ]] && compgen -G "$ROOT/src/regrepro/_core*.so" >/dev/null; then
		local lacking=
		for extra in "$@"; do
			[[ " ${have[*]} " == *" $extra "* ]] || lacking=1
		done
		[[ $lacking ]] || return 0
	fi
	# Extras once asked for stay, or two scripts would take turns at installing.
	local wanted
	wanted=$(printf '%s\n' "$@" "${have[@]:1}" | sed '/^$/d' | sort -u | paste -sd , -)
	say "Building the C core and installing regrepro[$wanted] into .venv"
	logged "$CACHE/pip.log" "$VENV/bin/python" -m pip install -q --editable "${ROOT}[$wanted]" ||
		die "pip could not install regrepro (above)"
	printf '%s %s\n' "$digest" "${wanted//,/ }" >"$stamp"
}

# Build what `regrepro watch` needs beside the core, with zig's C compiler from PyPI.
need_bpf() {
	local out=$ROOT/src/regrepro/_bpf digest
	digest=$(cd "$ROOT" && find csrc/bpf csrc/libbpf csrc/build_bpf.py -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum)
	[[ ! -f $out/digest || $(<"$out/digest") != "$digest" ]] || return 0
	say "Building watch's BPF programs"
	"$VENV/bin/python" -c 'import ziglang' 2>/dev/null ||
		logged "$CACHE/zig.log" "$VENV/bin/python" -m pip install -q ziglang || die "pip could not install ziglang (above)"
	logged "$CACHE/bpf.log" env ZIG_GLOBAL_CACHE_DIR="$CACHE/zig" ZIG_LOCAL_CACHE_DIR="$CACHE/zig" \
		"$VENV/bin/python" "$ROOT/csrc/build_bpf.py" "$out" || die "watch's BPF programs could not be built (above)"
	printf '%s\n' "$digest" >"$out/digest"
}

# One set-up at a time in a checkout. The lock ends with the subshell that holds it.
# set_up "PACKAGE..." EXTRA...
set_up() {
	local packages=$1
	shift
	mkdir -p "$CACHE"
	(
		flock 9
		# shellcheck disable=SC2086
		need_packages $packages
		need_venv "$@"
		[[ $packages != *libbpf-dev* ]] || need_bpf
	) 9>"$CACHE/set-up.lock"
}
