/* SPDX-License-Identifier: Apache-2.0 */
#ifndef REGREPRO_BPF_H
#define REGREPRO_BPF_H

#include <stddef.h>
#include <stdint.h>

/*
 * bpf(2): maps, programs and the ring that programs write into. Functions return 0 or a negative errno, as bpf(2) gives
 * it, or a close-on-exec file descriptor; what programs and maps are for is the caller's to know (linux/bpf.h).
 */

/* What bpf(2) answers to nothing: -ENOSYS where the kernel has none. */
int rr_bpf_answer(void);

int rr_bpf_map(uint32_t type, uint32_t key_size, uint32_t value_size, uint32_t entries, uint32_t flags,
	       const char *name);

/* Write an entry of a map, take it out, read it; `key` and `value` are as large as the map has them. */
int rr_bpf_map_set(int map, const void *key, const void *value);
int rr_bpf_map_unset(int map, const void *key);
int rr_bpf_map_get(int map, const void *key, void *value);

/* The key after `key`, the first for NULL or one that is gone; -ENOENT after the last. */
int rr_bpf_map_next(int map, const void *key, void *next);

/*
 * A map of one number. It is memory of the reader too, so that reading it takes no call of bpf(2), for which the reader
 * would need its capabilities for good.
 */
int rr_bpf_counter_open(const char *name);
int rr_bpf_counter_map(int counter, uintptr_t *address);
int rr_bpf_counter_unmap(uintptr_t address);
uint64_t rr_bpf_counter(uintptr_t address);

/* `attach`: of enum bpf_attach_type, for a program of BPF_PROG_TYPE_TRACING, with the function that it is for. */
struct rr_bpf_program {
	const char *name;
	uint32_t type;
	uint32_t attach;
	uint32_t btf_id; /* 0: none */
	int btf; /* of the module that has the type; 0: the kernel itself */
	const uint8_t *insns;
	uint32_t count; /* of instructions, 8 bytes each */
};

/* `log`, at least 128 bytes: the verifier's complaint where it refuses, that is for -EINVAL and -EACCES; else empty. */
int rr_bpf_load(const struct rr_bpf_program *program, char *log, uint32_t log_bytes);

/* Attach a program to the function that it was loaded for, as long as the descriptor is open. */
int rr_bpf_attach(int program);

/* The types of a module, "vmlinux" for the kernel's own; -ENOENT where it has none. */
int rr_bpf_btf(const char *module);

/* A ring of `bytes`, a power of two and a multiple of the system's page; readable (poll) when it has records. */
int rr_bpf_ring_open(uint32_t bytes);

struct rr_bpf_ring {
	uintptr_t consumer; /* where the reader says how far it is */
	uintptr_t producer; /* where the kernel does; a page on, the data, twice in a row */
	uint32_t bytes;
};
int rr_bpf_ring_map(int ring, uint32_t bytes, struct rr_bpf_ring *mapped);
int rr_bpf_ring_unmap(struct rr_bpf_ring *mapped);

/*
 * Take whole records, in the order in which they were begun, one word with its length (bytes) before each, and each
 * filled up to a whole word. Returns how many bytes of `out`; 0: there is none, or `room` does not hold the next.
 * -EBADMSG: the ring is not as this file knows it.
 */
int64_t rr_bpf_ring_take(const struct rr_bpf_ring *mapped, uint8_t *out, size_t room);

/* 1: all that was begun has been taken; 0: there is more, or it is being written at this moment. */
int rr_bpf_ring_empty(const struct rr_bpf_ring *mapped);

#endif
