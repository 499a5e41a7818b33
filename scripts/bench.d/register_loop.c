// SPDX-License-Identifier: Apache-2.0
/*
 * The bare counterpart of recorded registrations: register_loop LENGTH.
 *
 * Holds one buffer of LENGTH bytes of small pages. For each number N on standard input it registers and deregisters
 * the buffer N times on the first RDMA device and prints the seconds that this took.
 */
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
	/* As regrepro's stage registers by default: what NCCL asks for. */
	const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	struct ibv_device **devices;
	struct ibv_context *context;
	struct ibv_pd *pd;
	size_t length;
	char *buffer;
	long count;

	if (argc != 2) {
		fprintf(stderr, "usage: register_loop LENGTH\n");
		return 2;
	}
	length = strtoul(argv[1], NULL, 0);
	buffer = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (buffer == MAP_FAILED || madvise(buffer, length, MADV_NOHUGEPAGE)) {
		perror("memory");
		return 1;
	}
	memset(buffer, 1, length);
	devices = ibv_get_device_list(NULL);
	if (!devices || !devices[0]) {
		fprintf(stderr, "no RDMA device\n");
		return 1;
	}
	context = ibv_open_device(devices[0]);
	pd = context ? ibv_alloc_pd(context) : NULL;
	if (!pd) {
		perror("protection domain");
		return 1;
	}
	while (scanf("%ld", &count) == 1) {
		double start = now();

		for (long i = 0; i < count; i++) {
			struct ibv_mr *mr = ibv_reg_mr_iova2(pd, buffer, length, (uintptr_t)buffer, access);

			if (!mr) {
				perror("ibv_reg_mr_iova2");
				return 1;
			}
			if (ibv_dereg_mr(mr)) {
				perror("ibv_dereg_mr");
				return 1;
			}
		}
		printf("%.9f\n", now() - start);
		fflush(stdout);
	}
	ibv_dealloc_pd(pd);
	ibv_close_device(context);
	ibv_free_device_list(devices);
	return 0;
}
