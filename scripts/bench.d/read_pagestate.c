// SPDX-License-Identifier: Apache-2.0
/*
 * The bare counterpart of a full page state: read_pagestate LENGTH TIMES.
 *
 * Maps a memfd of LENGTH bytes TIMES times, one after another. For each number N on standard input it reads, N times,
 * the pagemap entries of the whole, then the entries of /proc/kpageflags and /proc/kpagecount of each page: one pread(2)
 * for each run of consecutive PFNs, up or down. Prints the seconds that this took.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PFN_MASK ((UINT64_C(1) << 55) - 1)

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static int read_at(int fd, void *buffer, size_t size, off_t place)
{
	size_t done = 0;

	while (done < size) {
		ssize_t got = pread(fd, (char *)buffer + done, size - done, place + done);

		if (got <= 0) {
			perror("pread");
			return -1;
		}
		done += got;
	}
	return 0;
}

static int read_kpage(int fd, const uint64_t *entries, uint64_t *out, size_t pages)
{
	size_t at = 0, n;

	while (at < pages) {
		uint64_t first = entries[at] & PFN_MASK;
		int step = 0;

		for (n = 1; at + n < pages; n++) {
			uint64_t next = entries[at + n] & PFN_MASK;

			if (n == 1)
				step = next == first + 1 ? 1 : next == first - 1 ? -1 : 0;
			if (!step || next != first + step * (int64_t)n)
				break;
		}
		if (read_at(fd, out + at, n * sizeof(*out), (step < 0 ? first - (n - 1) : first) * sizeof(*out)))
			return -1;
		at += n;
	}
	return 0;
}

int main(int argc, char **argv)
{
	const size_t page_size = sysconf(_SC_PAGESIZE);
	int memfd, pagemap, flags, counts;
	size_t length, times, pages;
	uint64_t *entries, *out;
	char *memory;
	long count;

	if (argc != 3) {
		fprintf(stderr, "usage: read_pagestate LENGTH TIMES\n");
		return 2;
	}
	length = strtoul(argv[1], NULL, 0);
	times = strtoul(argv[2], NULL, 0);
	pages = length / page_size * times;
	memfd = memfd_create("bench", MFD_CLOEXEC);
	if (memfd < 0 || ftruncate(memfd, length)) {
		perror("memfd");
		return 1;
	}
	memory = mmap(NULL, length * times, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (memory == MAP_FAILED) {
		perror("memory");
		return 1;
	}
	for (size_t i = 0; i < times; i++) {
		if (mmap(memory + i * length, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memfd, 0) ==
		    MAP_FAILED) {
			perror("memory");
			return 1;
		}
		memset(memory + i * length, 1, length);
	}
	entries = calloc(pages, sizeof(*entries));
	out = calloc(pages, sizeof(*out));
	pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	flags = open("/proc/kpageflags", O_RDONLY | O_CLOEXEC);
	counts = open("/proc/kpagecount", O_RDONLY | O_CLOEXEC);
	if (!entries || !out || pagemap < 0 || flags < 0 || counts < 0) {
		perror("open");
		return 1;
	}
	memset(out, 1, pages * sizeof(*out));
	while (scanf("%ld", &count) == 1) {
		double start = now();

		for (long i = 0; i < count; i++) {
			if (read_at(pagemap, entries, pages * sizeof(*entries),
				    (uintptr_t)memory / page_size * sizeof(*entries)) ||
			    read_kpage(flags, entries, out, pages) || read_kpage(counts, entries, out, pages))
				return 1;
		}
		printf("%.9f\n", now() - start);
		fflush(stdout);
	}
	return 0;
}
