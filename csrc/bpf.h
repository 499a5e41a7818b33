/* SPDX-License-Identifier: Apache-2.0 */
#ifndef REGREPRO_BPF_H
#define REGREPRO_BPF_H

#include <stddef.h>
#include <stdint.h>

/*
 * Maps of bpf(2) and the ring that programs write into, by their descriptors. Functions return 0 or a negative errno, as
 * bpf(2) gives it.
 */

/* Take an entry out of a map, read it; `key` and `value` are as large as the map has them. */
int rr_bpf_map_unset(int map, const void *key);
int rr_bpf_map_get(int map, const void *key, void *value);

/* The key after `key`, the first for NULL or one that is gone; -ENOENT after the last. */
int rr_bpf_map_next(int map, const void *key, void *next);

/* A ring of `bytes`, a power of two and a multiple of the system's page; readable (poll) when it has records. */
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
