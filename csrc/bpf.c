// SPDX-License-Identifier: Apache-2.0
/* Maps, programs and rings of bpf(2). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "bpf.h"

#include <errno.h>
#include <linux/bpf.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MMAPABLE (1U << 10) /* BPF_F_MMAPABLE, which headers have since 5.5 */
#define WORD sizeof(uint64_t)

static int call_bpf(enum bpf_cmd command, union bpf_attr *attr)
{
	long ret = syscall(SYS_bpf, command, attr, sizeof(*attr));

	return ret < 0 ? -errno : (int)ret;
}

int rr_bpf_answer(void)
{
	return syscall(SYS_bpf, -1, NULL, 0) < 0 ? -errno : 0;
}

int rr_bpf_map(uint32_t type, uint32_t key_size, uint32_t value_size, uint32_t entries, uint32_t flags,
	       const char *name)
{
	union bpf_attr attr;

	memset(&attr, 0, sizeof(attr));
	attr.map_type = type;
	attr.key_size = key_size;
	attr.value_size = value_size;
	attr.max_entries = entries;
	attr.map_flags = flags;
	strncpy(attr.map_name, name, sizeof(attr.map_name) - 1);
	return call_bpf(BPF_MAP_CREATE, &attr);
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

int rr_bpf_map_set(int map, const void *key, const void *value)
{
	return call_map(BPF_MAP_UPDATE_ELEM, map, key, value);
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

int rr_bpf_counter_open(const char *name)
{
	return rr_bpf_map(BPF_MAP_TYPE_ARRAY, sizeof(uint32_t), sizeof(uint64_t), 1, MMAPABLE, name);
}

static int map_memory(int fd, size_t offset, size_t bytes, int protection, uintptr_t *address)
{
	void *mapped = mmap(NULL, bytes, protection, MAP_SHARED, fd, (off_t)offset);

	*address = mapped == MAP_FAILED ? 0 : (uintptr_t)mapped;
	return mapped == MAP_FAILED ? -errno : 0;
}

int rr_bpf_counter_map(int counter, uintptr_t *address)
{
	return map_memory(counter, 0, page_size(), PROT_READ, address);
}

int rr_bpf_counter_unmap(uintptr_t address)
{
	return munmap((void *)address, page_size()) ? -errno : 0;
}

uint64_t rr_bpf_counter(uintptr_t address)
{
	return __atomic_load_n((const uint64_t *)address, __ATOMIC_RELAXED);
}

/* Without signals meanwhile: the verifier gives up with EAGAIN when one comes. */
static int load(union bpf_attr *attr)
{
	sigset_t all, before;
	int ret, error;

	sigfillset(&all);
	error = pthread_sigmask(SIG_SETMASK, &all, &before);
	if (error)
		return -error;
	ret = call_bpf(BPF_PROG_LOAD, attr);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return ret;
}

int rr_bpf_load(const struct rr_bpf_program *program, char *log, uint32_t log_bytes)
{
	union bpf_attr attr;
	int ret, again;

	memset(log, 0, log_bytes);
	memset(&attr, 0, sizeof(attr));
	attr.prog_type = program->type;
	attr.expected_attach_type = program->attach;
	attr.attach_btf_id = program->btf_id;
	attr.attach_prog_fd = (uint32_t)program->btf; /* attach_btf_obj_fd, as headers call it since 5.11 */
	attr.insns = (uintptr_t)program->insns;
	attr.insn_cnt = program->count;
	/* The license of these instructions; the kernel gives its tracing helpers to none that is not GPL-compatible. */
	attr.license = (uintptr_t)"Dual BSD/GPL";
	strncpy(attr.prog_name, program->name, sizeof(attr.prog_name) - 1);
	ret = load(&attr);
	if (ret != -EINVAL && ret != -EACCES)
		return ret;
	attr.log_level = 1;
	attr.log_buf = (uintptr_t)log;
	attr.log_size = log_bytes;
	again = load(&attr);
	return again < 0 ? ret : again;
}

int rr_bpf_attach(int program)
{
	union bpf_attr attr;

	memset(&attr, 0, sizeof(attr));
	attr.raw_tracepoint.prog_fd = (uint32_t)program;
	return call_bpf(BPF_RAW_TRACEPOINT_OPEN, &attr);
}

/* As struct bpf_btf_info is since 5.11, when it got names. */
struct btf_info {
	uint64_t btf;
	uint32_t btf_size;
	uint32_t id;
	uint64_t name;
	uint32_t name_len;
	uint32_t kernel_btf;
};

/* 1: it is the kernel's own of this name; 0: it is not. */
static int is_btf_of(int fd, const char *module)
{
	char name[64] = ""; /* MODULE_NAME_LEN is less */
	struct btf_info info = { .name = (uintptr_t)name, .name_len = sizeof(name) };
	union bpf_attr attr;
	int ret;

	memset(&attr, 0, sizeof(attr));
	attr.info.bpf_fd = (uint32_t)fd;
	attr.info.info_len = sizeof(info);
	attr.info.info = (uintptr_t)&info;
	ret = call_bpf(BPF_OBJ_GET_INFO_BY_FD, &attr);
	if (ret == -ENOSPC)
		return 0; /* of a longer name */
	return ret ? ret : info.kernel_btf && !strcmp(name, module);
}

int rr_bpf_btf(const char *module)
{
	union bpf_attr attr;
	uint32_t id = 0;
	int ret, fd;

	for (;;) {
		memset(&attr, 0, sizeof(attr));
		attr.start_id = id;
		ret = call_bpf(BPF_BTF_GET_NEXT_ID, &attr);
		if (ret)
			return ret;
		id = attr.next_id;
		memset(&attr, 0, sizeof(attr));
		attr.btf_id = id;
		fd = call_bpf(BPF_BTF_GET_FD_BY_ID, &attr);
		if (fd == -ENOENT)
			continue; /* it went away just now */
		if (fd < 0)
			return fd;
		ret = is_btf_of(fd, module);
		if (ret == 1)
			return fd;
		close(fd);
		if (ret)
			return ret;
	}
}

int rr_bpf_ring_open(uint32_t bytes)
{
	return rr_bpf_map(BPF_MAP_TYPE_RINGBUF, 0, 0, bytes, 0, "regrepro_ring");
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
