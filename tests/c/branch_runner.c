/*
 * Runs a function of branch_shapes.c step by step, and says how often addresses were reached.
 *
 * branch_runner LIBRARY FUNCTION ADDRESS...
 *
 * For each way to run it (see `ways`): lines "hit at=ADDRESS NAME=VALUE... stack=BYTES", before the instruction at
 * an ADDRESS runs, and at its end "returned null=0|1 NAME=VALUE..." with its arguments. Exits with 77 where a process may not
 * be traced.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include "branch_shapes.h"

#define ADDR 0x1111111111110000
#define IOVA 0x3333333333330000

typedef void *verb(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access);

static const struct {
	int fail_before, fail_op, old;
	size_t length;
	unsigned access;
} ways[] = {
	{0, 0, 0, 0x2222222222220000, 0x0f}, {0, 9, 0, 0x2222222222220000, 0x0f}, {1, 0, 0, 0x2222222222220000, 0x0f},
	{0, 0, 1, 0x2222222222220000, 0x4f}, {0, 9, 1, 0x2222222222220000, 0x4f}, {1, 9, 1, 0x2222222222220000, 0x4f},
	{0, 2, 0, 0x2222222222220000, 0x0f}, {0, 0, 0, 0, 0x0f},                  {0, 9, 0, 0, 0x4f},
};

static void *op(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	(void)addr, (void)length, (void)iova, (void)access;
	return pd->fail_op-- > 0 ? NULL : &pd->region;
}

static void *many(struct domain *pd, int a, int b, int c, int d, int e, void *addr, size_t length, uint64_t iova,
		  unsigned access, int f, int g)
{
	(void)a, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g;
	*(void *volatile *)&addr = NULL;
	*(volatile size_t *)&length = 0;
	*(volatile uint64_t *)&iova = 0;
	*(volatile unsigned *)&access = 0;
	return pd->fail_op-- > 0 ? NULL : &pd->region;
}

static int before(struct domain *pd, void *addr, size_t length)
{
	(void)addr, (void)length;
	return pd->fail_before;
}

static void after(struct domain *pd, void *addr, size_t length)
{
	(void)pd, (void)addr, (void)length;
}

static void tell(struct domain *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	(void)pd, (void)addr, (void)length, (void)iova, (void)access;
}

static void change(struct request *request)
{
	memset(request, 0x55, sizeof(*request));
}

static uint64_t number(struct domain *pd)
{
	return pd->sum++;
}

static struct domain pd = {op, many, before, after, tell, change, number, 0, 0, 0, 0, {0}};

struct shared {
	uint64_t base;
	int null;
};

static void child(struct shared *shared, char **argv, size_t way)
{
	void *library = dlopen(argv[1], RTLD_NOW);
	verb *function = library ? (verb *)dlsym(library, argv[2]) : NULL;
	Dl_info info;

	if (!function || !dladdr((void *)function, &info)) {
		fprintf(stderr, "%s\n", dlerror());
		_exit(1);
	}
	pd.fail_before = ways[way].fail_before;
	pd.fail_op = ways[way].fail_op;
	pd.old = ways[way].old;
	shared->base = (uint64_t)info.dli_fbase;
	if (ptrace(PTRACE_TRACEME, 0, NULL, NULL))
		_exit(77);
	raise(SIGSTOP);
	/* The upper half of the register that has `access` is anything. */
	void *(*call)(struct domain *, void *, size_t, uint64_t, uint64_t) = (void *)function;
	shared->null = !call(&pd, (void *)ADDR, ways[way].length, IOVA, 0x4444444400000000 | ways[way].access);
	raise(SIGSTOP);
	_exit(0);
}

static void show(pid_t pid, uint64_t address, const unsigned long long *values, const char *const *names, uint64_t stack)
{
	printf("hit at=%lx", (unsigned long)address);
	for (int i = 0; names[i]; i++)
		printf(" %s=%llx", names[i], values[i]);
	printf(" stack=");
	for (int i = 0; i < 64; i++) {
		long word = ptrace(PTRACE_PEEKDATA, pid, (void *)(stack + 8 * i), NULL);
		for (int byte = 0; byte < 8; byte++)
			printf("%02x", (unsigned)((unsigned long)word >> (8 * byte) & 0xff));
	}
	printf("\n");
}

static int is_asked(uint64_t address, char **asked)
{
	for (; *asked; asked++)
		if (strtoull(*asked, NULL, 16) == address)
			return 1;
	return 0;
}

static void look(pid_t pid, uint64_t base, char **asked)
{
	struct user_regs_struct regs;
	struct iovec vector = {&regs, sizeof(regs)};

	if (ptrace(PTRACE_GETREGSET, pid, (void *)NT_PRSTATUS, &vector))
		exit(77);
#if defined(__x86_64__)
	if (!is_asked(regs.rip - base, asked))
		return;
	const char *const names[] = {"rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "r8", "r9",
				     "r10", "r11", "r12", "r13", "r14", "r15", NULL};
	const unsigned long long values[] = {regs.rax, regs.rbx, regs.rcx, regs.rdx, regs.rsi, regs.rdi, regs.rbp, regs.r8,
					     regs.r9,  regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15};
	show(pid, regs.rip - base, values, names, regs.rsp);
#elif defined(__aarch64__)
	if (!is_asked(regs.pc - base, asked))
		return;
	static const char *const names[] = {"x0",  "x1",  "x2",  "x3",  "x4",  "x5",  "x6",  "x7",  "x8",  "x9",  "x10",
					    "x11", "x12", "x13", "x14", "x15", "x16", "x17", "x18", "x19", "x20", "x21",
					    "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x29", "x30", NULL};
	show(pid, regs.pc - base, regs.regs, names, regs.sp);
#else
#error "this machine is not known"
#endif
}

int main(int argc, char **argv)
{
	struct shared *shared;

	if (argc < 4)
		return 2;
	setvbuf(stdout, NULL, _IOFBF, 1 << 16);
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (size_t way = 0; way < sizeof(ways) / sizeof(*ways); way++) {
		int status, stops = 0;
		pid_t pid;

		fflush(stdout);
		pid = fork();
		if (!pid)
			child(shared, argv, way);
		while (waitpid(pid, &status, 0) == pid && WIFSTOPPED(status)) {
			if (WSTOPSIG(status) == SIGSTOP && ++stops == 2)
				break;
			if (WSTOPSIG(status) != SIGSTOP && WSTOPSIG(status) != SIGTRAP)
				return 3;
			look(pid, shared->base, argv + 3);
			if (ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL))
				return 77;
		}
		if (stops != 2)
			return WIFEXITED(status) && WEXITSTATUS(status) ? WEXITSTATUS(status) : 3;
		printf("returned null=%d pd=%lx addr=%lx length=%zx iova=%lx access=%x\n", shared->null,
		       (unsigned long)&pd, ADDR, ways[way].length, IOVA, ways[way].access);
		kill(pid, SIGKILL);
		waitpid(pid, &status, 0);
	}
	return 0;
}
