// SPDX-License-Identifier: Apache-2.0
/* Maps and rings of bpf(2), of which others gave the descriptors. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "bpf.h"

#include <errno.h>
#include <linux/bpf.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WORD sizeof(uint64_t)

static int call_bpf(enum bpf_cmd command, union bpf_attr *attr)
{
	long ret = syscall(SYS_bpf, command, attr, sizeof(*attr));

	return ret < 0 ? -errno : (int)ret;
}

static int call_map(enum bpf_cmd command, int map, const void *key, const void *value)
{
	union bpf_attr attr;

	memset(&attr, 0, sizeof(attr));
	attr.map_fd = (uint32_t)map;
	attr.key = (uintptr_t)key;
	attr.value = (uintptr_t)value;
	return call_bpf(command, &attr);
}

int rr_bpf_map_unset(int map, const void *key)
{
	return call_map(BPF_MAP_DELETE_ELEM, map, key, NULL);
}

int rr_bpf_map_get(int map, const void *key, void *value)
{
	return call_map(BPF_MAP_LOOKUP_ELEM, map, key, value);
}

int rr_bpf_map_next(int map, const void *key, void *next)
{
	return call_map(BPF_MAP_GET_NEXT_KEY, map, key, next); /* where a value would be, attr has `next_key` */
}

static size_t page_size(void)
{
	return (size_t)sysconf(_SC_PAGESIZE);
}

static int map_memory(int fd, size_t offset, size_t bytes, int protection, uintptr_t *address)
{
	void *mapped = mmap(NULL, bytes, protection, MAP_SHARED, fd, (off_t)offset);

	*address = mapped == MAP_FAILED ? 0 : (uintptr_t)mapped;
	return mapped == MAP_FAILED ? -errno : 0;
}

int rr_bpf_ring_map(int ring, uint32_t bytes, struct rr_bpf_ring *mapped)
{
	size_t page = page_size();
	int ret;

	memset(mapped, 0, sizeof(*mapped));
	if (bytes % page || bytes & (bytes - 1) || !bytes)
		return -EINVAL;
	ret = map_memory(ring, 0, page, PROT_READ | PROT_WRITE, &mapped->consumer);
	if (ret)
		return ret;
	ret = map_memory(ring, page, page + 2 * (size_t)bytes, PROT_READ, &mapped->producer);
	if (ret) {
		munmap((void *)mapped->consumer, page);
		memset(mapped, 0, sizeof(*mapped));
		return ret;
	}
	mapped->bytes = bytes;
	return 0;
}

int rr_bpf_ring_unmap(struct rr_bpf_ring *mapped)
{
	size_t page = page_size();
	int ret = 0;

	if (munmap((void *)mapped->producer, page + 2 * (size_t)mapped->bytes))
		ret = -errno;
	if (munmap((void *)mapped->consumer, page) && !ret)
		ret = -errno;
	memset(mapped, 0, sizeof(*mapped));
	return ret;
}

static uint64_t whole_words(uint64_t bytes)
{
	return (bytes + WORD - 1) / WORD * WORD;
}

/*
 * Documentation/bpf/ringbuf.rst, kernel/bpf/ringbuf.c: positions only grow; before each record a word, of which the
 * lower half is the record's length and two bits, BUSY while it is being written and DISCARD when it is nothing.
 */
int64_t rr_bpf_ring_take(const struct rr_bpf_ring *mapped, uint8_t *out, size_t room)
{
	const uint8_t *data = (const uint8_t *)mapped->producer + page_size();
	unsigned long *consumer = (unsigned long *)mapped->consumer, at = *consumer; /* that only we write */
	unsigned long end = __atomic_load_n((const unsigned long *)mapped->producer, __ATOMIC_ACQUIRE);
	size_t used = 0;

	while (at != end) {
		const uint8_t *record = data + (at & (mapped->bytes - 1));
		uint64_t length;
		uint32_t head;
		size_t size;

		if (at % WORD || end - at > mapped->bytes)
			return -EBADMSG;
		head = __atomic_load_n((const uint32_t *)record, __ATOMIC_ACQUIRE);
		if (head & BPF_RINGBUF_BUSY_BIT)
			break;
		length = head & ~BPF_RINGBUF_DISCARD_BIT;
		size = (size_t)whole_words(length);
		if (WORD + size > end - at)
			return -EBADMSG;
		if (!(head & BPF_RINGBUF_DISCARD_BIT)) {
			if (room - used < WORD + size)
				break;
			memcpy(out + used, &length, WORD);
			memcpy(out + used + WORD, record + WORD, size);
			used += WORD + size;
		}
		at += WORD + size;
		__atomic_store_n(consumer, at, __ATOMIC_RELEASE);
	}
	return (int64_t)used;
}

int rr_bpf_ring_empty(const struct rr_bpf_ring *mapped)
{
	return __atomic_load_n((const unsigned long *)mapped->producer, __ATOMIC_ACQUIRE) ==
	       *(const unsigned long *)mapped->consumer;
}
