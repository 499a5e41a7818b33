// SPDX-License-Identifier: Apache-2.0
/*
 * How quick this machine is just now: pace.
 *
 * For each number N on standard input it makes N system calls that do next to nothing and prints the seconds that they
 * took.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

int main(void)
{
	long count;

	while (scanf("%ld", &count) == 1) {
		double start = now();

		for (long i = 0; i < count; i++)
			syscall(SYS_getppid);
		printf("%.9f\n", now() - start);
		fflush(stdout);
	}
	return 0;
}
