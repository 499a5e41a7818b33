// SPDX-License-Identifier: Apache-2.0
/* Ranges of user memory: mapping, populating, gathering, checksums. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Values of the kernel's ABI that an older libc's headers may lack (include/uapi/asm-generic/mman-common.h, mman.h). */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif
#ifndef SYS_futex
#define SYS_futex SYS_futex_time64
#endif

/* Populate in pieces, so that one call does not hold the mmap lock for many seconds. */
#define POPULATE_PIECE ((size_t)256 << 20)

static size_t page_size(void)
{
	return (size_t)sysconf(_SC_PAGESIZE);
}

int rr_map(size_t length, size_t alignment, int prot, int flags, int fd, uint64_t offset, uintptr_t *address)
{
	size_t page = page_size();
	size_t mapped, slack, head, tail;
	uintptr_t start, aligned;
	void *area;

	*address = 0;
	if (length == 0 || length > SIZE_MAX - page)
		return -EINVAL;
	if (alignment <= page) {
		area = mmap(NULL, length, prot, flags, fd, (off_t)offset);
		if (area == MAP_FAILED)
			return -errno;
		*address = (uintptr_t)area;
		return 0;
	}
	if (alignment & (alignment - 1))
		return -EINVAL;
	mapped = (length + page - 1) & ~(page - 1);
	slack = alignment - page;
	if (mapped > SIZE_MAX - slack)
		return -ENOMEM;
	/* Reserve more than enough, map what is wanted over its aligned part, and give the rest back. */
	area = mmap(NULL, mapped + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (area == MAP_FAILED)
		return -errno;
	start = (uintptr_t)area;
	aligned = (start + alignment - 1) & ~(uintptr_t)(alignment - 1);
	if (mmap((void *)aligned, length, prot, flags | MAP_FIXED, fd, (off_t)offset) == MAP_FAILED) {
		int failure = -errno;

		munmap(area, mapped + slack);
		return failure;
	}
	head = aligned - start;
	tail = slack - head;
	if (head)
		munmap(area, head);
	if (tail)
		munmap((void *)(aligned + mapped), tail);
	*address = aligned;
	return 0;
}

int rr_unmap(uintptr_t address, size_t length)
{
	return munmap((void *)address, length) ? -errno : 0;
}

int rr_advise(uintptr_t address, size_t length, int advice)
{
	return madvise((void *)address, length, advice) ? -errno : 0;
}

int rr_keep_from_numa_balancing(void)
{
	return syscall(SYS_set_mempolicy, MPOL_LOCAL, NULL, 0) ? -errno : 0;
}

int rr_shm_unlinked(const char *name)
{
	int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);

	if (fd < 0)
		return -errno;
	if (shm_unlink(name)) {
		int failure = -errno;

		close(fd);
		return failure;
	}
	return fd;
}

/*
 * Write-fault one page without changing it: FUTEX_WAKE_OP does `*word |= 0` atomically in the kernel, which takes the
 * same way through the fault handler as a store, but answers EFAULT where a store would raise SIGSEGV or SIGBUS.
 */
static int touch_page(uintptr_t word)
{
	if (syscall(SYS_futex, word, FUTEX_WAKE_OP_PRIVATE, 0, (void *)0, word,
		    FUTEX_OP(FUTEX_OP_OR, 0, FUTEX_OP_CMP_EQ, 0)) < 0)
		return -errno;
	return 0;
}

static int touch_pages(uintptr_t start, uintptr_t end, size_t page)
{
	int ret;

	for (; start < end; start += page) {
		ret = touch_page(start);
		if (ret)
			return ret;
	}
	return 0;
}

struct populate_part {
	uintptr_t start;
	uintptr_t end;
	size_t page;
	bool by_touch;
	int result;
};

static void *populate_part(void *argument)
{
	struct populate_part *part = argument;
	uintptr_t start = part->start;

	part->result = 0;
	while (start < part->end && !part->by_touch) {
		size_t left = part->end - start;
		size_t piece = left < POPULATE_PIECE ? left : POPULATE_PIECE;

		if (!madvise((void *)start, piece, MADV_POPULATE_WRITE)) {
			start += piece;
			continue;
		}
		if (errno == EINTR || errno == EAGAIN)
			continue;
		/*
		 * EINVAL: a kernel before 5.14 does not know the advice, a newer one refuses special mappings.
		 * Touching tells the two apart.
		 */
		if (errno != EINVAL) {
			part->result = -errno;
			return NULL;
		}
		part->by_touch = true;
	}
	if (start < part->end)
		part->result = touch_pages(start, part->end, part->page);
	return NULL;
}

static int populate(uintptr_t address, size_t length, unsigned int threads, bool by_touch)
{
	size_t page = page_size();
	size_t pages, each, index;
	uintptr_t start, end;
	struct populate_part *parts;
	pthread_t *handles;
	sigset_t all, before;
	size_t started = 0;
	int ret = 0;

	if (length == 0)
		return 0;
	if (address > UINTPTR_MAX - length || address + length > UINTPTR_MAX - page)
		return -EINVAL;
	start = address & ~(uintptr_t)(page - 1);
	end = (address + length + page - 1) & ~(uintptr_t)(page - 1);
	pages = (end - start) / page;
	if (threads < 1)
		threads = 1;
	if (threads > pages)
		threads = (unsigned int)pages;
	if (threads == 1) {
		struct populate_part whole = { .start = start, .end = end, .page = page, .by_touch = by_touch };

		populate_part(&whole);
		return whole.result;
	}
	parts = calloc(threads, sizeof(*parts));
	handles = calloc(threads, sizeof(*handles));
	if (!parts || !handles) {
		free(parts);
		free(handles);
		return -ENOMEM;
	}
	each = (pages + threads - 1) / threads * page;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	for (index = 0; index < threads; index++) {
		size_t offset = index * each;

		if (offset >= end - start)
			break;
		parts[index].start = start + offset;
		parts[index].end = end - start - offset > each ? start + offset + each : end;
		parts[index].page = page;
		parts[index].by_touch = by_touch;
		if (pthread_create(&handles[index], NULL, populate_part, &parts[index])) {
			/* No thread to be had: do the rest here. */
			parts[index].end = end;
			populate_part(&parts[index]);
			ret = parts[index].result;
			break;
		}
		started++;
	}
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	for (index = 0; index < started; index++) {
		pthread_join(handles[index], NULL);
		if (parts[index].result && !ret)
			ret = parts[index].result;
	}
	free(parts);
	free(handles);
	return ret;
}

int rr_populate(uintptr_t address, size_t length, unsigned int threads)
{
	return populate(address, length, threads, false);
}

int rr_populate_by_touch(uintptr_t address, size_t length, unsigned int threads)
{
	return populate(address, length, threads, true);
}

/*
 * Without MREMAP_DONTUNMAP the source would become a hole, which any mmap() of any thread could take, and which the
 * owner of the source would later unmap from under it. Kernels before 5.7, and file mappings before 5.13, say EINVAL;
 * there the hole is filled again at once.
 */
static int move_pages(uintptr_t source, uintptr_t target, size_t length)
{
	int flags = MREMAP_MAYMOVE | MREMAP_FIXED;

	if (mremap((void *)source, length, length, flags | MREMAP_DONTUNMAP, (void *)target) != MAP_FAILED)
		return 0;
	if (errno != EINVAL)
		return -errno;
	if (mremap((void *)source, length, length, flags, (void *)target) == MAP_FAILED)
		return -errno;
	/* Failure here leaves a hole, which is what mremap() promises anyway. */
	(void)!mmap((void *)source, length, PROT_NONE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
	return 0;
}

int rr_gather(const uint64_t *sources, size_t pages, uintptr_t target, size_t *moved)
{
	size_t page = page_size();
	size_t index = 0;
	size_t run;
	int ret;

	*moved = 0;
	if (target % page || pages > SIZE_MAX / page || target > UINTPTR_MAX - pages * page)
		return -EINVAL;
	while (index < pages) {
		/* Neighbours that stay neighbours move together: one mapping instead of many (vm.max_map_count). */
		run = 1;
		while (index + run < pages && sources[index + run] == sources[index + run - 1] + page)
			run++;
		ret = move_pages((uintptr_t)sources[index], target + index * page, run * page);
		if (ret == -EFAULT && run > 1) {
			/* Neighbours in different mappings do not move together before 6.17. */
			run = 1;
			ret = move_pages((uintptr_t)sources[index], target + index * page, page);
		}
		if (ret)
			return ret;
		index += run;
		*moved = index;
	}
	return 0;
}

static uint64_t rotate_left(uint64_t value, unsigned int bits)
{
	return value << bits | value >> (64 - bits);
}

/* Odd constants, so that each step is a bijection of the state for a given word, and of the word for a given state. */
#define MIX_A UINT64_C(0x9E3779B97F4A7C15)
#define MIX_B UINT64_C(0xBF58476D1CE4E5B9)

static uint64_t mix(uint64_t state, uint64_t word)
{
	return rotate_left((state ^ word) * MIX_A, 29);
}

uint64_t rr_checksum(uintptr_t address, size_t length)
{
	const unsigned char *bytes = (const unsigned char *)address;
	uint64_t lanes[4] = { MIX_A, MIX_B, ~MIX_A, ~MIX_B };
	uint64_t words[4];
	uint64_t sum = length;
	size_t left = length;
	unsigned int lane;

	for (; left >= sizeof(words); left -= sizeof(words), bytes += sizeof(words)) {
		memcpy(words, bytes, sizeof(words));
		lanes[0] = mix(lanes[0], words[0]);
		lanes[1] = mix(lanes[1], words[1]);
		lanes[2] = mix(lanes[2], words[2]);
		lanes[3] = mix(lanes[3], words[3]);
	}
	if (left) {
		memset(words, 0, sizeof(words));
		memcpy(words, bytes, left);
		for (lane = 0; lane < 4; lane++)
			lanes[lane] = mix(lanes[lane], words[lane]);
	}
	for (lane = 0; lane < 4; lane++)
		sum = mix(sum, lanes[lane]);
	return sum ^ sum >> 32;
}

static uint64_t pattern(uint64_t seed, uint64_t index)
{
	uint64_t word = (seed ^ MIX_B) + (index + 1) * MIX_A;

	word = (word ^ word >> 30) * MIX_B;
	return word ^ word >> 31;
}

void rr_fill(uintptr_t address, size_t length, uint64_t seed)
{
	unsigned char *bytes = (unsigned char *)address;
	uint64_t index = 0;
	uint64_t word;

	for (; length >= sizeof(word); length -= sizeof(word), bytes += sizeof(word)) {
		word = pattern(seed, index++);
		memcpy(bytes, &word, sizeof(word));
	}
	if (length) {
		word = pattern(seed, index);
		memcpy(bytes, &word, length);
	}
}

void rr_copy(uintptr_t target, uintptr_t source, size_t length)
{
	memmove((void *)target, (const void *)source, length);
}
