// SPDX-License-Identifier: Apache-2.0
/* Uprobes without tracefs, their BPF programs, and the rings that their hits come in. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "uprobe.h"

#include "bpf.h"

#include <asm/ptrace.h>
#include <errno.h>
#include <linux/bpf.h>
#include <linux/perf_event.h>
#include <stddef.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__LP64__)
#define CONTEXT(member) offsetof(struct pt_regs, member)
#elif defined(__aarch64__) && defined(__LP64__)
#define CONTEXT(member) offsetof(struct user_pt_regs, member)
#define GENERAL(name, number) { name, number, CONTEXT(regs[number]) }
#endif

/*
 * asm/perf_regs.h of each architecture, in the order of its bits: so does the kernel write them. `context`: where the
 * context of a BPF program has the register (asm/ptrace.h, bpf_user_pt_regs_t).
 */
static const struct {
	const char *name;
	unsigned int bit;
	size_t context;
} registers[] = {
#if defined(__x86_64__) && defined(__LP64__)
	{ "rax", 0, CONTEXT(rax) },  { "rbx", 1, CONTEXT(rbx) },  { "rcx", 2, CONTEXT(rcx) },
	{ "rdx", 3, CONTEXT(rdx) },  { "rsi", 4, CONTEXT(rsi) },  { "rdi", 5, CONTEXT(rdi) },
	{ "rbp", 6, CONTEXT(rbp) },  { "rsp", 7, CONTEXT(rsp) },  { "r8", 16, CONTEXT(r8) },
	{ "r9", 17, CONTEXT(r9) },   { "r10", 18, CONTEXT(r10) }, { "r11", 19, CONTEXT(r11) },
	{ "r12", 20, CONTEXT(r12) }, { "r13", 21, CONTEXT(r13) }, { "r14", 22, CONTEXT(r14) },
	{ "r15", 23, CONTEXT(r15) },
#define STACK_POINTER CONTEXT(rsp)
#elif defined(__aarch64__) && defined(__LP64__)
	GENERAL("x0", 0),   GENERAL("x1", 1),   GENERAL("x2", 2),   GENERAL("x3", 3),	GENERAL("x4", 4),
	GENERAL("x5", 5),   GENERAL("x6", 6),   GENERAL("x7", 7),   GENERAL("x8", 8),	GENERAL("x9", 9),
	GENERAL("x10", 10), GENERAL("x11", 11), GENERAL("x12", 12), GENERAL("x13", 13), GENERAL("x14", 14),
	GENERAL("x15", 15), GENERAL("x16", 16), GENERAL("x17", 17), GENERAL("x18", 18), GENERAL("x19", 19),
	GENERAL("x20", 20), GENERAL("x21", 21), GENERAL("x22", 22), GENERAL("x23", 23), GENERAL("x24", 24),
	GENERAL("x25", 25), GENERAL("x26", 26), GENERAL("x27", 27), GENERAL("x28", 28), GENERAL("x29", 29),
	GENERAL("x30", 30), { "sp", 31, CONTEXT(sp) },
#define STACK_POINTER CONTEXT(sp)
#else
#define STACK_POINTER 0
#endif
	{ NULL, 0, 0 },
};

#define NR_REGISTERS (sizeof(registers) / sizeof(registers[0]) - 1)
#define WORD sizeof(uint64_t)

_Static_assert(NR_REGISTERS <= sizeof(((struct rr_uprobe_hit *)0)->registers) / WORD, "room for the registers");

/*
 * A sample of SAMPLE_TYPE: header; pid and tid; time; the number that the program sent, behind its length; ABI of the
 * registers, and the registers unless that is 0; length of the stack and, unless that is 0, so many bytes and how many
 * of them the kernel could read. All in words.
 */
#define SAMPLE_TYPE                                                                                                   \
	(PERF_SAMPLE_TID | PERF_SAMPLE_TIME | PERF_SAMPLE_RAW | PERF_SAMPLE_REGS_USER | PERF_SAMPLE_STACK_USER)
enum { AT_TASK = 1, AT_TIME, AT_NUMBER, AT_ABI, AT_REGISTERS };

const char *rr_uprobe_register(size_t index)
{
	return registers[index < NR_REGISTERS + 1 ? index : NR_REGISTERS].name;
}

size_t rr_uprobe_context(size_t index)
{
	return registers[index < NR_REGISTERS + 1 ? index : NR_REGISTERS].context;
}

size_t rr_uprobe_record_bytes(uint32_t stack_bytes)
{
	return (AT_REGISTERS + NR_REGISTERS + 1) * WORD + (stack_bytes ? stack_bytes + WORD : 0);
}

static uint64_t register_mask(void)
{
	uint64_t mask = 0;
	size_t index;

	for (index = 0; registers[index].name; index++)
		mask |= (uint64_t)1 << registers[index].bit;
	return mask;
}

static size_t page_size(void)
{
	return (size_t)sysconf(_SC_PAGESIZE);
}

int rr_uprobe_rings_open(uint32_t cpus)
{
	return rr_bpf_map(BPF_MAP_TYPE_PERF_EVENT_ARRAY, sizeof(uint32_t), sizeof(uint32_t), cpus, 0, "regrepro_rings");
}

/* An instruction of BPF: linux/bpf.h and linux/bpf_common.h have the codes. */
#define INSN(operation, to, from, offset, number)                                                                     \
	((struct bpf_insn){ .code = (operation), .dst_reg = (to), .src_reg = (from), .off = (offset), .imm = (number) })
#define SET(to, number) INSN(BPF_ALU64 | BPF_MOV | BPF_K, to, 0, 0, number)
#define SET_LOW(to, number) INSN(BPF_ALU | BPF_MOV | BPF_K, to, 0, 0, number) /* and the upper half to 0 */
#define COPY(to, from) INSN(BPF_ALU64 | BPF_MOV | BPF_X, to, from, 0, 0)
#define ADD(to, number) INSN(BPF_ALU64 | BPF_ADD | BPF_K, to, 0, 0, number)
#define STORE_32(to, offset, number) INSN(BPF_ST | BPF_MEM | BPF_W, to, 0, offset, number)
#define ADD_ATOMIC_64(to, from) INSN(BPF_STX | BPF_XADD | BPF_DW, to, from, 0, 0)
#define SET_MAP(to, map) INSN(BPF_LD | BPF_IMM | BPF_DW, to, BPF_PSEUDO_MAP_FD, 0, map), INSN(0, 0, 0, 0, 0)
#define CALL(helper) INSN(BPF_JMP | BPF_CALL, 0, 0, 0, helper)
#define SKIP_IF_0(from, count) INSN(BPF_JMP | BPF_JEQ | BPF_K, from, 0, count, 0)
#define SKIP_IF_NOT_0(from, count) INSN(BPF_JMP | BPF_JNE | BPF_K, from, 0, count, 0)
#define LOAD_64(to, from, offset) INSN(BPF_LDX | BPF_MEM | BPF_DW, to, from, offset, 0)
#define SHIFT_LEFT(to, bits) INSN(BPF_ALU64 | BPF_LSH | BPF_K, to, 0, 0, bits)
#define EXIT INSN(BPF_JMP | BPF_EXIT, 0, 0, 0, 0)

/* Instructions, one after the other. */
struct code {
	struct bpf_insn insns[40];
	uint32_t count;
};

static void append(struct code *code, const struct bpf_insn *insns, size_t count)
{
	memcpy(code->insns + code->count, insns, count * sizeof(*insns));
	code->count += (uint32_t)count;
}

#define APPEND(code, ...)                                                                                             \
	append(code, (const struct bpf_insn[]){ __VA_ARGS__ },                                                        \
	       sizeof((const struct bpf_insn[]){ __VA_ARGS__ }) / sizeof(struct bpf_insn))

/* End unless the register, or what lies on the stack of the task, is 0. Register 6 has the context. */
static void append_zero(struct code *code, const struct rr_uprobe_zero *zero)
{
	uint8_t width = zero->size == sizeof(uint64_t) ? BPF_DW : BPF_W;

	if (zero->reg >= 0) {
		APPEND(code, LOAD_64(BPF_REG_2, BPF_REG_6, (int16_t)registers[zero->reg].context));
		if (width == BPF_W)
			APPEND(code, SHIFT_LEFT(BPF_REG_2, 32));
	} else {
		APPEND(code, COPY(BPF_REG_1, BPF_REG_10), ADD(BPF_REG_1, -16), SET(BPF_REG_2, (int32_t)zero->size),
		       LOAD_64(BPF_REG_3, BPF_REG_6, (int16_t)STACK_POINTER), ADD(BPF_REG_3, zero->offset),
		       CALL(BPF_FUNC_probe_read_user), SKIP_IF_NOT_0(BPF_REG_0, 4),
		       INSN(BPF_LDX | BPF_MEM | width, BPF_REG_2, BPF_REG_10, -16, 0));
	}
	APPEND(code, SKIP_IF_0(BPF_REG_2, 2), SET(BPF_REG_0, 0), EXIT);
}

/* Send the number, or count it as lost. */
static void append_send(struct code *code, uint32_t number, int rings, int lost)
{
	APPEND(code, STORE_32(BPF_REG_10, -4, (int32_t)number), COPY(BPF_REG_1, BPF_REG_6), SET_MAP(BPF_REG_2, rings),
	       SET_LOW(BPF_REG_3, -1), /* BPF_F_CURRENT_CPU */
	       COPY(BPF_REG_4, BPF_REG_10), ADD(BPF_REG_4, -4), SET(BPF_REG_5, sizeof(uint32_t)),
	       CALL(BPF_FUNC_perf_event_output), SKIP_IF_0(BPF_REG_0, 9));
	/* Not sent: no room in the ring, no ring for this CPU, a ring whose CPU has been offline. */
	APPEND(code, STORE_32(BPF_REG_10, -4, 0), SET_MAP(BPF_REG_1, lost), COPY(BPF_REG_2, BPF_REG_10),
	       ADD(BPF_REG_2, -4), CALL(BPF_FUNC_map_lookup_elem), SKIP_IF_0(BPF_REG_0, 2), SET(BPF_REG_1, 1),
	       ADD_ATOMIC_64(BPF_REG_0, BPF_REG_1));
	/* 0: the hit goes no further, to the event itself, which has no ring. */
	APPEND(code, SET(BPF_REG_0, 0), EXIT);
}

int rr_uprobe_program(uint32_t number, int rings, int lost, const struct rr_uprobe_zero *zero, char *log,
		      uint32_t log_bytes)
{
	struct code code = { .count = 0 };
	struct rr_bpf_program program = { .name = "regrepro_probe", .type = BPF_PROG_TYPE_KPROBE };

	memset(log, 0, log_bytes);
	/* Register 1 has the context at first; 10 is the end of the program's stack. */
	APPEND(&code, COPY(BPF_REG_6, BPF_REG_1));
	if (zero->size) {
		if ((zero->size != 4 && zero->size != 8) || zero->reg >= (int32_t)NR_REGISTERS)
			return -EINVAL;
		append_zero(&code, zero);
	}
	append_send(&code, number, rings, lost);
	program.insns = (const uint8_t *)code.insns;
	program.count = code.count;
	return rr_bpf_load(&program, log, log_bytes);
}

/* An event of all processes on one CPU. */
static int open_event(struct perf_event_attr *attr, int cpu)
{
	long fd;

	attr->size = sizeof(*attr);
	fd = syscall(SYS_perf_event_open, attr, -1, cpu, -1, PERF_FLAG_FD_CLOEXEC);
	return fd < 0 ? -errno : (int)fd;
}

int rr_uprobe_open(uint32_t type, int at_return, const char *name, uint64_t offset, int cpu)
{
	struct perf_event_attr attr;

	memset(&attr, 0, sizeof(attr));
	attr.type = type;
	attr.config = at_return ? 1 : 0; /* the format of both PMUs: "retprobe" is bit 0 */
	attr.config1 = (uintptr_t)name;
	attr.config2 = offset;
	attr.disabled = 1;
	return open_event(&attr, cpu);
}

int rr_uprobe_start(int event, int program)
{
	if (ioctl(event, PERF_EVENT_IOC_SET_BPF, program))
		return -errno;
	return ioctl(event, PERF_EVENT_IOC_ENABLE, 0) ? -errno : 0;
}

int rr_uprobe_ring_open(int cpu, uint32_t stack_bytes)
{
	struct perf_event_attr attr;

	if (!register_mask())
		return -ENOSYS;
	memset(&attr, 0, sizeof(attr));
	attr.type = PERF_TYPE_SOFTWARE;
	attr.config = PERF_COUNT_SW_BPF_OUTPUT;
	attr.sample_period = 1;
	attr.sample_type = SAMPLE_TYPE;
	attr.sample_regs_user = register_mask();
	attr.sample_stack_user = stack_bytes;
	attr.wakeup_events = 1;
	attr.read_format = PERF_FORMAT_TOTAL_TIME_ENABLED;
	attr.use_clockid = 1;
	attr.clockid = CLOCK_BOOTTIME;
	return open_event(&attr, cpu);
}

int rr_uprobe_ring_map(int ring, size_t pages, uintptr_t *address)
{
	void *mapped;

	*address = 0;
	if (!pages || pages & (pages - 1) || pages > SIZE_MAX / page_size() / 2)
		return -EINVAL;
	mapped = mmap(NULL, (pages + 1) * page_size(), PROT_READ | PROT_WRITE, MAP_SHARED, ring, 0);
	if (mapped == MAP_FAILED)
		return -errno;
	*address = (uintptr_t)mapped;
	return 0;
}

int rr_uprobe_ring_unmap(uintptr_t address, size_t pages)
{
	return munmap((void *)address, (pages + 1) * page_size()) ? -errno : 0;
}

static int time_enabled(int ring, uint64_t *ns)
{
	uint64_t values[2]; /* the count, the time */
	ssize_t length = read(ring, values, sizeof(values));

	if (length < 0)
		return -errno;
	if (length != (ssize_t)sizeof(values))
		return -EPROTO;
	*ns = values[1];
	return 0;
}

/* A CPU that goes offline stops the clocks of its events, and does not start them again when it comes back. */
int rr_uprobe_ring_runs(int ring)
{
	uint64_t before = 0, after = 0;
	int ret;

	ret = time_enabled(ring, &before);
	if (ret)
		return ret;
	ret = time_enabled(ring, &after);
	return ret ? ret : after != before;
}

/* The data of a ring. Positions only grow; a word, aligned as it is, never lies across the end. */
struct view {
	const uint8_t *data;
	uint64_t size; /* a power of two */
};

static uint64_t word(const struct view *ring, uint64_t at)
{
	uint64_t value;

	memcpy(&value, ring->data + (at & (ring->size - 1)), sizeof(value));
	return value;
}

static void copy(const struct view *ring, uint64_t at, uint8_t *out, size_t length)
{
	uint64_t start = at & (ring->size - 1);
	size_t first = length < ring->size - start ? length : (size_t)(ring->size - start);

	memcpy(out, ring->data + start, first);
	memcpy(out + first, ring->data, length - first);
}

static struct perf_event_header header(const struct view *ring, uint64_t at)
{
	uint64_t value = word(ring, at);
	struct perf_event_header head;

	_Static_assert(sizeof(head) == sizeof(value), "a header is one word");
	memcpy(&head, &value, sizeof(head));
	return head;
}

/* From the word that holds the length of the stack on. */
static int take_stack(const struct view *ring, uint64_t at, uint64_t end, uint8_t *out, uint64_t *got)
{
	uint64_t length = word(ring, at);

	*got = 0;
	at += WORD;
	if (!length)
		return 0;
	if (length % WORD || end - at < WORD || length > end - at - WORD)
		return -EBADMSG;
	*got = word(ring, at + length);
	if (*got > length)
		return -EBADMSG;
	copy(ring, at, out, (size_t)*got);
	return 0;
}

/* 1: a hit; 0: one of a task that is not 64-bit. */
static int take_sample(const struct view *ring, uint64_t at, uint64_t end, struct rr_uprobe_hit *hit, uint8_t *stack)
{
	uint64_t task, number;
	uint32_t length;
	size_t index;
	int ret;

	if (end - at < (AT_REGISTERS + 1) * WORD)
		return -EBADMSG;
	if (word(ring, at + AT_ABI * WORD) != PERF_SAMPLE_REGS_ABI_64)
		return 0;
	if (end - at < (AT_REGISTERS + NR_REGISTERS + 1) * WORD)
		return -EBADMSG;
	number = word(ring, at + AT_NUMBER * WORD);
	memcpy(&length, &number, sizeof(length));
	if (length != sizeof(hit->probe))
		return -EBADMSG;
	memcpy(&hit->probe, (uint8_t *)&number + sizeof(length), sizeof(hit->probe));
	hit->ns = word(ring, at + AT_TIME * WORD);
	task = word(ring, at + AT_TASK * WORD);
	memcpy(&hit->pid, &task, sizeof(hit->pid));
	memcpy(&hit->tid, (uint8_t *)&task + sizeof(hit->pid), sizeof(hit->tid));
	for (index = 0; registers[index].name; index++)
		hit->registers[index] = word(ring, at + (AT_REGISTERS + index) * WORD);
	ret = take_stack(ring, at + (AT_REGISTERS + NR_REGISTERS) * WORD, end, stack, &hit->stack_length);
	return ret ? ret : 1;
}

/* What is no sample. */
static void take_other(uint32_t type, struct rr_uprobe_tally *tally)
{
	switch (type) {
	case PERF_RECORD_LOST: /* the program has counted those, and before there was room to tell of them */
	case PERF_RECORD_LOST_SAMPLES:
	case PERF_RECORD_UNTHROTTLE:
		break;
	case PERF_RECORD_THROTTLE:
		tally->throttled++;
		break;
	default:
		tally->unreadable++;
	}
}

/* Take records from `*tail` to `head`, and move `*tail` after what was taken. */
static size_t take(const struct view *ring, uint64_t *tail, uint64_t head, struct rr_uprobe_hit *hits, size_t room,
		   uint8_t *stacks, struct rr_uprobe_tally *tally)
{
	size_t count = 0;
	uint64_t used = 0; /* of `stacks`: no more than the records took of the ring */

	while (*tail != head && count < room) {
		uint64_t at = *tail, left = head - at;
		struct perf_event_header record;
		int ret;

		/* Nothing after a record of no sane length can be found. */
		if (at % WORD || head % WORD || left > ring->size)
			break;
		record = header(ring, at);
		if (record.size < sizeof(record) || record.size % WORD || record.size > left)
			break;
		*tail = at + record.size;
		if (record.type != PERF_RECORD_SAMPLE) {
			take_other(record.type, tally);
			continue;
		}
		ret = take_sample(ring, at, *tail, &hits[count], stacks + used);
		if (ret < 0) {
			tally->unreadable++;
		} else if (!ret) {
			tally->foreign++;
		} else {
			hits[count].stack = used;
			used += hits[count++].stack_length;
		}
	}
	if (*tail != head && count < room) {
		tally->unreadable++;
		*tail = head;
	}
	return count;
}

size_t rr_uprobe_drain(uintptr_t address, size_t pages, struct rr_uprobe_hit *hits, size_t room, uint8_t *stacks,
		       struct rr_uprobe_tally *tally)
{
	struct perf_event_mmap_page *control = (struct perf_event_mmap_page *)address;
	struct view ring = { (const uint8_t *)address + page_size(), (uint64_t)pages * page_size() };
	uint64_t head, tail = control->data_tail; /* that only we write */
	size_t count;

	/* Pairs with the kernel's barriers in perf_output_put_handle() and __perf_output_begin(). */
	head = __atomic_load_n(&control->data_head, __ATOMIC_ACQUIRE);
	count = take(&ring, &tail, head, hits, room, stacks, tally);
	__atomic_store_n(&control->data_tail, tail, __ATOMIC_RELEASE);
	return count;
}
