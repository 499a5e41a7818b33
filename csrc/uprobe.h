/* SPDX-License-Identifier: Apache-2.0 */
#ifndef REGREPRO_UPROBE_H
#define REGREPRO_UPROBE_H

#include <stddef.h>
#include <stdint.h>

/*
 * Uprobes: a breakpoint on one instruction of a file, in every process that maps it, for as long as the file
 * descriptors are open, whatever ends the process that holds them. A probe is one perf event and one BPF program,
 * however many CPUs there are: the kernel runs the program of a uprobe's event for hits on every CPU
 * (__uprobe_perf_func() in kernel/trace/trace_uprobe.c), whatever CPU the event is of. An event for each CPU would do
 * without BPF, but closing one waits for grace periods of RCU, one event after the other: seconds on a large node.
 *
 * The program sends the probe's number to the ring of its CPU. The kernel writes the rest of the hit itself, as the
 * ring's event asks: task, time, registers, stack (bpf_perf_event_output() in kernel/trace/bpf_trace.c,
 * perf_output_sample() in kernel/events/core.c). Functions return 0 or a negative errno, or a close-on-exec file
 * descriptor.
 */

/* One hit. */
struct rr_uprobe_hit {
	uint64_t ns; /* CLOCK_BOOTTIME */
	uint32_t probe; /* number of the program */
	uint32_t pid;
	uint32_t tid;
	uint64_t stack; /* where its stack begins in the bytes that rr_uprobe_drain() gives */
	uint64_t stack_length;
	uint64_t registers[32]; /* in the order of rr_uprobe_register(); the rest is not touched */
};

/* What a ring held that is no hit. Draining only adds to it. */
struct rr_uprobe_tally {
	uint64_t foreign; /* hits of tasks that are not 64-bit */
	uint64_t throttled; /* times that the kernel held an event back */
	uint64_t unreadable; /* records that are not as this file knows them */
};

/* Name of a register that is read, counted from 0; NULL after the last. None on an architecture not known here. */
const char *rr_uprobe_register(size_t index);

/* Where the context of the program of a probe has it, bytes. */
size_t rr_uprobe_context(size_t index);

/* Bytes of the record of a hit with so much of the stack, a multiple of 8. */
size_t rr_uprobe_record_bytes(uint32_t stack_bytes);

/* The map of rings: a place for each CPU below `cpus`; rr_bpf_map_set() puts an event's ring into it. */
int rr_uprobe_rings_open(uint32_t cpus);

/* What a hit must be to count: 0 in `size` bytes, 4 (the low ones of a register) or 8. */
struct rr_uprobe_zero {
	int32_t reg; /* index of rr_uprobe_register(); below 0: memory at the stack pointer + `offset` */
	int32_t offset;
	uint32_t size; /* 0: every hit counts */
};

/*
 * The program of the probe of this number: it counts hits that no ring takes, for whatever reason, in `lost`, a counter
 * (rr_bpf_counter_open()). Where the stack cannot be read, a hit counts. `log`, at least 128 bytes: the
 * verifier's complaint where it refuses, that is for -EINVAL and -EACCES; else empty. -EINVAL too for another `zero`.
 */
int rr_uprobe_program(uint32_t number, int rings, int lost, const struct rr_uprobe_zero *zero, char *log,
		      uint32_t log_bytes);

/*
 * The probe, on all CPUs; `cpu` is any that is online, `type` that of the PMU. It hits nothing before
 * rr_uprobe_start(). errno of perf_event_open(2); also 524, ENOTSUPP of the kernel, for an instruction that it does
 * not probe. With the type of the PMU "kprobe" `name` is that of a function of the kernel. `at_return`: when the
 * function that begins there returns.
 */
int rr_uprobe_open(uint32_t type, int at_return, const char *name, uint64_t offset, int cpu);

/* From now on hits run the program, which the event keeps: its descriptor may be closed. */
int rr_uprobe_start(int event, int program);

/* The event that has the ring of a CPU, readable after hits; `stack_bytes`, a multiple of 8, are of each hit. */
int rr_uprobe_ring_open(int cpu, uint32_t stack_bytes);

/* `pages`, of the system's size, must be a power of two; one more is mapped for the positions. */
int rr_uprobe_ring_map(int ring, size_t pages, uintptr_t *address);
int rr_uprobe_ring_unmap(uintptr_t address, size_t pages);

/* 1 while the kernel runs the ring's event; 0 for good once its CPU has been offline. Interrupts that CPU. */
int rr_uprobe_ring_runs(int ring);

/*
 * Take hits out of a mapped ring, at most `room`, without waiting, and what there is of their stacks; `stacks` is as
 * large as `pages`. Returns the number of hits; fewer than `room`: the ring was emptied.
 */
size_t rr_uprobe_drain(uintptr_t address, size_t pages, struct rr_uprobe_hit *hits, size_t room, uint8_t *stacks,
		       struct rr_uprobe_tally *tally);

#endif
