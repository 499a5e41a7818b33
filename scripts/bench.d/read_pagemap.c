// SPDX-License-Identifier: Apache-2.0
/*
 * The bare counterpart of reading PFNs in bulk: read_pagemap LENGTH.
 *
 * Holds LENGTH bytes of small pages. For each number N on standard input it reads their pagemap entries N times, by
 * pread(2) into a buffer that is there already, and prints the seconds that this took.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
	const size_t page_size = sysconf(_SC_PAGESIZE);
	size_t length, size;
	uint64_t *entries;
	char *memory;
	long count;
	int fd;

	if (argc != 2) {
		fprintf(stderr, "usage: read_pagemap LENGTH\n");
		return 2;
	}
	length = strtoul(argv[1], NULL, 0);
	size = length / page_size * sizeof(*entries);
	memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED || madvise(memory, length, MADV_NOHUGEPAGE)) {
		perror("memory");
		return 1;
	}
	memset(memory, 1, length);
	entries = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (entries == MAP_FAILED) {
		perror("memory");
		return 1;
	}
	memset(entries, 0, size);
	fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	if (fd < 0) {
		perror("/proc/self/pagemap");
		return 1;
	}
	while (scanf("%ld", &count) == 1) {
		double start = now();

		for (long i = 0; i < count; i++) {
			size_t done = 0;

			while (done < size) {
				off_t place = (uintptr_t)memory / page_size * sizeof(*entries) + done;
				ssize_t got = pread(fd, (char *)entries + done, size - done, place);

				if (got <= 0) {
					perror("pread");
					return 1;
				}
				done += got;
			}
		}
		printf("%.9f\n", now() - start);
		fflush(stdout);
	}
	close(fd);
	return 0;
}
