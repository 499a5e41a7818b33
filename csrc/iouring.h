/* SPDX-License-Identifier: Apache-2.0 */
#ifndef REGREPRO_IOURING_H
#define REGREPRO_IOURING_H

#include <stddef.h>
#include <stdint.h>

/*
 * io_uring fixed buffers: the kernel pins them with FOLL_WRITE | FOLL_LONGTERM (io_uring/rsrc.c; fs/io_uring.c before
 * 6.0). A ring is a file descriptor; one ring holds one registration. Returns are 0 or a negative errno.
 */

/* Returns a close-on-exec file descriptor or a negative errno. */
int rr_ring_open(void);

/* Register the range as buffers of at most 1 GiB each, the kernel's limit; a length of 0 goes to the kernel as it is. */
int rr_ring_register(int ring, uintptr_t address, size_t length);
int rr_ring_unregister(int ring);

/* 1 if the ring holds registered buffers, 0 if not, a negative errno if the kernel does not say. */
int rr_ring_registered(int ring);

#endif
