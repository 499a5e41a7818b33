// SPDX-License-Identifier: Apache-2.0
/* Holding memory on one node, and giving single pages of it back. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "pressure.h"

#include <errno.h>
#include <limits.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* CONFIG_NODES_SHIFT is at most 10 (arch/x86/Kconfig, arch/arm64/Kconfig). */
#define MAX_NODES 1024
#define LONG_BITS (CHAR_BIT * sizeof(unsigned long))

/* The kernel reads one bit less than it is told (get_nodes(), mm/mempolicy.c). */
#define MASK_BITS ((unsigned long)MAX_NODES + 1)

int rr_allocate_on_node(int node)
{
	unsigned long mask[MAX_NODES / LONG_BITS] = { 0 };

	if (node < 0)
		return syscall(SYS_set_mempolicy, MPOL_LOCAL, NULL, 0) ? -errno : 0;
	if (node >= MAX_NODES)
		return -EINVAL;
	mask[(size_t)node / LONG_BITS] = 1UL << ((size_t)node % LONG_BITS);
	return syscall(SYS_set_mempolicy, MPOL_BIND, mask, MASK_BITS) ? -errno : 0;
}

int rr_drop_pages(uintptr_t address, size_t pages, const uint8_t *marks, size_t *dropped)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	size_t first = 0;
	size_t end;

	*dropped = 0;
	if (address % page || pages > SIZE_MAX / page || address > UINTPTR_MAX - pages * page)
		return -EINVAL;
	while (first < pages) {
		if (!marks[first]) {
			first++;
			continue;
		}
		for (end = first + 1; end < pages && marks[end]; end++)
			;
		if (madvise((void *)(address + first * page), (end - first) * page, MADV_DONTNEED))
			return -errno;
		*dropped += end - first;
		first = end;
	}
	return 0;
}
