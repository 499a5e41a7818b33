// SPDX-License-Identifier: Apache-2.0
/* io_uring fixed buffers, by system calls alone: no ring is ever mapped, no request is ever submitted. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "iouring.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The same numbers on every architecture that Linux added them to together (5.1), but for alpha. */
#ifndef SYS_io_uring_setup
#define SYS_io_uring_setup 425
#endif
#ifndef SYS_io_uring_register
#define SYS_io_uring_register 427
#endif

/* include/uapi/linux/io_uring.h; declared here so that the core also builds beside headers older than 5.1. */
#define REGISTER_BUFFERS 0
#define UNREGISTER_BUFFERS 1
#define PARAMS_SIZE 120

#define BUFFER_LIMIT ((size_t)1 << 30)

int rr_ring_open(void)
{
	uint64_t params[PARAMS_SIZE / sizeof(uint64_t)];
	long fd;

	memset(params, 0, sizeof(params));
	fd = syscall(SYS_io_uring_setup, 1, params);
	return fd < 0 ? -errno : (int)fd;
}

int rr_ring_register(int ring, uintptr_t address, size_t length)
{
	struct iovec one = { .iov_base = (void *)address, .iov_len = length };
	struct iovec *buffers = &one;
	size_t count = 1;
	size_t index;
	int ret = 0;

	if (length > BUFFER_LIMIT) {
		count = length / BUFFER_LIMIT + (length % BUFFER_LIMIT != 0);
		/* More buffers than the kernel takes (1,024; since 5.13 16,384): its own limit, said by its own errno. */
		if (count > (size_t)1 << 20)
			return -EINVAL;
		buffers = calloc(count, sizeof(*buffers));
		if (!buffers)
			return -ENOMEM;
		for (index = 0; index < count; index++) {
			size_t offset = index * BUFFER_LIMIT;

			buffers[index].iov_base = (void *)(address + offset);
			buffers[index].iov_len = length - offset < BUFFER_LIMIT ? length - offset : BUFFER_LIMIT;
		}
	}
	if (syscall(SYS_io_uring_register, ring, REGISTER_BUFFERS, buffers, (unsigned int)count) < 0)
		ret = -errno;
	if (buffers != &one)
		free(buffers);
	return ret;
}

int rr_ring_unregister(int ring)
{
	return syscall(SYS_io_uring_register, ring, UNREGISTER_BUFFERS, NULL, 0) < 0 ? -errno : 0;
}

/*
 * A ring that holds buffers answers EBUSY to a second registration before it looks at anything else; one that holds
 * none answers EINVAL to a registration of no buffers. Neither changes anything.
 */
int rr_ring_registered(int ring)
{
	struct iovec none = { 0 };

	if (syscall(SYS_io_uring_register, ring, REGISTER_BUFFERS, &none, 0) == 0)
		return -EPROTO;
	if (errno == EBUSY)
		return 1;
	if (errno == EINVAL)
		return 0;
	return -errno;
}
