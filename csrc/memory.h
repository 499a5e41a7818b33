/* SPDX-License-Identifier: Apache-2.0 */
#ifndef REGREPRO_MEMORY_H
#define REGREPRO_MEMORY_H

#include <stddef.h>
#include <stdint.h>

/*
 * Ranges of user memory. Addresses and lengths are in bytes. Every function that returns int returns 0 or a negative
 * errno, unless said otherwise.
 */

/* mmap(2) at an address that is a multiple of `alignment` (0: any page). `offset` is the offset into the file. */
int rr_map(size_t length, size_t alignment, int prot, int flags, int fd, uint64_t offset, uintptr_t *address);
int rr_unmap(uintptr_t address, size_t length);
int rr_advise(uintptr_t address, size_t length, int advice);

/*
 * Keep NUMA balancing away from this process' memory, from now on and in its children: a task with a memory policy of
 * its own is left alone (vma_policy_mof(), mm/mempolicy.c). The policy set is MPOL_LOCAL, which allocates as the
 * default does. -ENOSYS: this kernel has no CONFIG_NUMA, and so no balancing.
 */
int rr_keep_from_numa_balancing(void);

/* Open a new POSIX shared memory object and unlink its name at once. Returns a file descriptor or a negative errno. */
int rr_shm_unlinked(const char *name);

/*
 * Make every page of the range present and writable, without changing a byte, by `threads` threads (at least one).
 * MADV_POPULATE_WRITE (Linux 5.14) where the kernel has it, else one atomic `or 0` a page. A page that cannot be had
 * is an error, never a signal.
 */
int rr_populate(uintptr_t address, size_t length, unsigned int threads);

/* The same without MADV_POPULATE_WRITE, as on a kernel that lacks it. */
int rr_populate_by_touch(uintptr_t address, size_t length, unsigned int threads);

/*
 * Move `pages` pages, whose addresses are in `sources`, one after another to `target` (page-aligned, already reserved
 * by the caller). The physical pages stay the same. The sources stay mapped, empty. `*moved` says how many pages had
 * moved when the function returned, also after an error.
 */
int rr_gather(const uint64_t *sources, size_t pages, uintptr_t target, size_t *moved);

/* 64-bit checksum. A range in which one 8-byte word differs never has the same checksum. */
uint64_t rr_checksum(uintptr_t address, size_t length);

/* Fill with a pattern in which every 8-byte word depends on the seed and on its place. */
void rr_fill(uintptr_t address, size_t length, uint64_t seed);

/* Copy bytes between two addresses of this process. */
void rr_copy(uintptr_t target, uintptr_t source, size_t length);

#endif
