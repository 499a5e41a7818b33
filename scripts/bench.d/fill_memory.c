// SPDX-License-Identifier: Apache-2.0
/*
 * The bare counterpart of filling memory for pressure: fill_memory LENGTH.
 *
 * For each number N on standard input it maps LENGTH bytes with MAP_POPULATE, N times, as stress-ng --vm-populate does,
 * and unmaps them. Prints the seconds that the mapping took.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
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
	size_t length;
	long count;

	if (argc != 2) {
		fprintf(stderr, "usage: fill_memory LENGTH\n");
		return 2;
	}
	length = strtoul(argv[1], NULL, 0);
	while (scanf("%ld", &count) == 1) {
		double spent = 0;

		for (long i = 0; i < count; i++) {
			double start = now();
			void *memory = mmap(NULL, length, PROT_READ | PROT_WRITE,
					    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

			if (memory == MAP_FAILED) {
				perror("mmap");
				return 1;
			}
			spent += now() - start;
			munmap(memory, length);
		}
		printf("%.9f\n", spent);
		fflush(stdout);
	}
	return 0;
}
