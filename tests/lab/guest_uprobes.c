/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What guest_uprobes.py probes. `place`: print where the probed instruction lies in this file. `run THREADS BASE`:
 * print its address, then run it for each line of stdin so many times in each thread; a thread's argument is
 * BASE + its number, and it stays on the CPU of that number. Answers each line with one: pid, ns a run.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* At `middle` both arguments lie on the stack, the first one above the stack pointer; a scratch register has 5 more. */
long whole(long first, long second);
extern const char middle[];
#if defined(__x86_64__)
__asm__(".text\n.globl whole, middle\n.type whole, @function\n"
	"whole: push %rsi\n push %rdi\n lea 5(%rdi), %rax\n"
	"middle: add %rsi, %rax\n pop %rdi\n pop %rsi\n ret\n"
	".size whole, . - whole\n");
#elif defined(__aarch64__)
__asm__(".text\n.globl whole, middle\n.type whole, %function\n"
	"whole: stp x0, x1, [sp, #-16]!\n add x8, x0, #5\n"
	"middle: add x0, x8, x1\n add sp, sp, #16\n ret\n"
	".size whole, . - whole\n");
#else
#error "write the two instructions for this architecture"
#endif

#define SECOND 0x5ec0ddL

static long base, count;
static pthread_barrier_t begin, end;

static int place(struct dl_phdr_info *info, size_t size, void *data)
{
	uintptr_t address = (uintptr_t)middle - info->dlpi_addr;
	int index;

	for (index = 0; index < info->dlpi_phnum; index++) {
		const ElfW(Phdr) *part = &info->dlpi_phdr[index];

		if (part->p_type == PT_LOAD && address >= part->p_vaddr && address < part->p_vaddr + part->p_filesz)
			printf("%lu\n", (unsigned long)(address - part->p_vaddr + part->p_offset));
	}
	return 1; /* the program comes first */
}

static void *thread(void *number)
{
	long mine = (long)(intptr_t)number, run;
	cpu_set_t cpu;

	CPU_ZERO(&cpu);
	CPU_SET(mine, &cpu);
	sched_setaffinity(0, sizeof(cpu), &cpu);
	for (;;) {
		pthread_barrier_wait(&begin);
		for (run = 0; run < count; run++)
			if (whole(base + mine, SECOND) != base + mine + 5 + SECOND)
				abort();
		pthread_barrier_wait(&end);
	}
	return NULL;
}

static int64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

int main(int argc, char **argv)
{
	long threads, index;
	char line[32];

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc == 2 && !strcmp(argv[1], "place"))
		return dl_iterate_phdr(place, NULL) != 1;
	if (argc != 4)
		return 2;
	threads = atol(argv[2]);
	base = atol(argv[3]);
	pthread_barrier_init(&begin, NULL, (unsigned int)threads + 1);
	pthread_barrier_init(&end, NULL, (unsigned int)threads + 1);
	for (index = 0; index < threads; index++) {
		pthread_t one;

		if (pthread_create(&one, NULL, thread, (void *)(intptr_t)index))
			return 1;
	}
	printf("%lu\n", (unsigned long)(uintptr_t)middle);
	while (fgets(line, sizeof(line), stdin)) {
		int64_t start = now();

		count = atol(line);
		pthread_barrier_wait(&begin);
		pthread_barrier_wait(&end);
		printf("%d %lld\n", (int)getpid(), (long long)((now() - start) / (count ? count : 1)));
	}
	return 0;
}
