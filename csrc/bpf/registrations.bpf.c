// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Follows registrations of RDMA memory in the kernel: silent on success, a record of what failed.
 *
 * Each program comes twice: for a trampoline (fentry, fexit), and for a kprobe where a function has none. The loader
 * attaches a program to as many functions as there are, each with a cookie: the number that its records bear, and what
 * is special of that function. No program needs a type of a module: what is read of one is read by offsets that the
 * loader has written into `config`, where it knows them.
 *
 * A request that succeeds costs one number written where one stood before, a pin in it two additions; each other
 * program compares what its function returned, and ends.
 */
#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include "registers.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

typedef __u64 u64;
typedef __u32 u32;
typedef __s64 s64;
typedef __s32 s32;

#define EAGAIN 11
#define MAX_ERRNO 4095 /* include/linux/err.h */
#define RLIMIT_MEMLOCK 8 /* include/uapi/asm-generic/resource.h */
#define THREADS 16384 /* that are remembered; of others it is said that nobody saw their request begin */
#define RING_BYTES (8 << 20) /* some 16,000 failures */
#define PARAMETERS 6
#define STUCK_PAGES 4 /* that are told of one failed migration */
#define STACK_FRAMES 16 /* that are told of a short-term pin */
#define NO_SIZE 64
#define NOTHING (~0ULL) /* `present` where what was asked for is not known */
#define ALL (~0ULL - 1) /* `present` of a request that has every parameter */

/* A cookie: the number of a record's kind in its low half, and these. */
#define POINTER (1ULL << 32) /* the function returns a pointer or an ERR_PTR() */
#define NOT_EAGAIN (1ULL << 33) /* EAGAIN is no failure: the pages moved, and the pin is tried again */
#define DMABUF (1ULL << 34)
#define BEHIND_MM (1ULL << 35) /* the parameters of a pin come behind the mm */
#define ARRAY (1ULL << 36) /* of pages, and no page */
#define COMMAND (1ULL << 37) /* the request has a struct ib_uverbs_reg_mr in user space */
#define ALWAYS (1ULL << 38) /* parameters are kept outside of requests, too */
#define DRIVER_SHIFT 40 /* the number of a driver's function in `counts` */

/* Written by the loader before the programs are loaded. */
struct config {
	u64 longterm; /* FOLL_LONGTERM; 0: not known */
	u32 reasons[2]; /* of enum migrate_reason: those of pins; all ones: none */
	u32 has_request; /* the offsets that follow are known: struct uverbs_attr_bundle, include/rdma/uverbs_ioctl.h */
	u32 command; /* of ucore.inbuf */
	u32 present; /* of attr_present */
	u32 attributes; /* of attrs */
	u32 attribute_size;
	u32 attribute[2][5]; /* indices of start, length, iova, access, fd: of host memory, of a dma-buf */
	u32 follow_unpins;
};
const volatile struct config config = {};

u64 lost; /* records that found no room */
u64 uncounted; /* registrations that found none in `counts` or `sizes` */

/* Kernel types: only what is read here, found by the running kernel's BTF. */
#define FOUND __attribute__((preserve_access_index))

struct list_head {
	struct list_head *next;
} FOUND;

typedef struct {
	int counter;
} FOUND atomic_t;

typedef struct {
	s64 counter;
} FOUND atomic64_t;

struct page {
	unsigned long flags;
	struct list_head lru;
	atomic_t _refcount;
	atomic_t _mapcount;
} FOUND;

/* Since 6.18 (memdesc_flags_t, include/linux/mm_types.h). */
struct page___memdesc {
	struct {
		unsigned long f;
	} flags;
} FOUND;

struct folio {
	struct list_head lru;
	atomic_t _pincount;
} FOUND;

struct rlimit {
	unsigned long rlim_cur;
	unsigned long rlim_max;
} FOUND;

struct signal_struct {
	struct rlimit rlim[16];
} FOUND;

struct mm_struct {
	atomic64_t pinned_vm;
} FOUND;

struct task_struct {
	struct task_struct *group_leader;
	u64 start_boottime;
	struct signal_struct *signal;
	struct mm_struct *mm;
} FOUND;

/* Of a thread that is or was in a request. */
struct request {
	u64 since; /* ns of boottime; 0: its begin was not seen */
	u64 calls; /* pins in it */
	u64 pages; /* of those that succeeded */
	u64 bundle; /* of the request, by a kprobe */
};

/* The parameters of a function that is followed by kprobes, until it returns; nested calls are of the outermost. */
struct call {
	u64 since; /* of the request */
	u64 depth;
	u64 parameters[PARAMETERS];
};

struct call_key {
	u32 thread;
	u32 number;
};

struct count_key {
	u32 driver;
	u32 path; /* enum registration_path */
	u32 process;
	u32 nothing;
	char comm[16];
};

struct size_key {
	u32 driver;
	__u16 path;
	__u16 power; /* of two, or NO_SIZE */
};

enum registration_path { HOST = 1, DMA_BUF = 2, PEER_OR_ON_DEMAND = 3 };

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, RING_BYTES);
} ring SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, THREADS);
	__type(key, u32);
	__type(value, struct request);
} requests SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, THREADS);
	__type(key, struct call_key);
	__type(value, struct call);
} calls SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH); /* processes that made a short-term pin */
	__uint(max_entries, THREADS);
	__type(key, u32);
	__type(value, u64);
} pinners SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, THREADS);
	__type(key, struct count_key);
	__type(value, u64[2]); /* registrations, bytes */
} counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, THREADS);
	__type(key, struct size_key);
	__type(value, u64);
} sizes SEC(".maps");

/* Records: words of 8 bytes, in front of all of them these. */
struct header {
	u64 number;
	u64 task; /* process << 32 | thread */
	u64 ns; /* of boottime */
};

#define RECORD(name, words)            \
	struct name {                  \
		struct header header;  \
		u64 word[words];       \
	}
RECORD(record_0, 0);
RECORD(record_1, 1);
RECORD(record_pin, 4);
RECORD(record_library, PARAMETERS);
RECORD(record_migration, 2 + 5 * STUCK_PAGES);
RECORD(record_short_term_pin, 5 + STACK_FRAMES);

struct record_request {
	struct header header;
	u64 ret, since, calls, pages, uid, start, memlock, pinned;
	char comm[16];
	u64 asked_start, asked_length, asked_iova, asked_access, asked_fd, present;
};

/* What a program is about: a function at its entry or its return. */
struct at {
	void *ctx;
	u64 cookie;
	u64 ret;
	const struct pt_regs *registers; /* at an entry by a kprobe or a uprobe */
	struct call *kept; /* at a return by a kprobe */
	bool trampoline;
};

static __always_inline u32 thread(void)
{
	return (u32)bpf_get_current_pid_tgid();
}

static __always_inline u32 process(void)
{
	return bpf_get_current_pid_tgid() >> 32;
}

static __always_inline struct request *request_of_thread(void)
{
	u32 key = thread();

	return bpf_map_lookup_elem(&requests, &key);
}

/* A parameter; 0 where it was not kept. */
static __always_inline u64 parameter(const struct at *at, int position)
{
	u64 value = 0;

	if (at->trampoline)
		bpf_get_func_arg(at->ctx, position, &value);
	else if (at->registers)
		value = register_of(at->registers, position);
	else if (at->kept)
		value = at->kept->parameters[position];
	return value;
}

static __always_inline void begin_record(struct header *header, u64 cookie)
{
	header->number = (u32)cookie;
	header->task = bpf_get_current_pid_tgid();
	header->ns = bpf_ktime_get_boot_ns();
}

/* A record to be filled in and given to bpf_ringbuf_submit(), or NULL, and it is counted as lost. */
static __always_inline void *new_record(u64 bytes, u64 cookie)
{
	struct header *header = bpf_ringbuf_reserve(&ring, bytes, 0);

	if (header)
		begin_record(header, cookie);
	else
		__sync_fetch_and_add(&lost, 1);
	return header;
}
#define NEW(record, at) ((record) = new_record(sizeof(*(record)), (at)->cookie))

static __always_inline u64 word_at(u64 address)
{
	u64 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), (const void *)address);
	return value;
}

static __always_inline bool is_error(u64 pointer)
{
	return pointer > -(u64)MAX_ERRNO - 1;
}

/* Where the kernel begins a request: the thread is in one since now. */
static __always_inline void begin_request(const struct at *at)
{
	struct request new = { .since = bpf_ktime_get_boot_ns() }, *request = request_of_thread();
	u32 key = thread();

	if (!at->trampoline)
		new.bundle = parameter(at, 0);
	if (request)
		*request = new;
	else
		bpf_map_update_elem(&requests, &key, &new, BPF_ANY);
}

static __always_inline void tell_task(struct record_request *record)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();

	record->start = BPF_CORE_READ(task, group_leader, start_boottime);
	record->memlock = BPF_CORE_READ(task, signal, rlim[RLIMIT_MEMLOCK].rlim_cur);
	record->pinned = BPF_CORE_READ(task, mm, pinned_vm.counter);
}

/* What the failed request had asked for, of its only parameter, the bundle. */
static __always_inline void tell_asked(struct record_request *record, u64 bundle, u64 cookie)
{
	u64 attributes = bundle + config.attributes, command;
	bool dmabuf = cookie & DMABUF;
	u32 access = 0;

	record->asked_start = record->asked_length = record->asked_iova = record->asked_access = 0;
	record->asked_fd = 0;
	record->present = NOTHING;
	if (!config.has_request || !bundle)
		return;
	if (!(cookie & COMMAND)) {
		record->asked_start = word_at(attributes + config.attribute[dmabuf][0] * config.attribute_size);
		record->asked_length = word_at(attributes + config.attribute[dmabuf][1] * config.attribute_size);
		record->asked_iova = word_at(attributes + config.attribute[dmabuf][2] * config.attribute_size);
		record->asked_access = word_at(attributes + config.attribute[dmabuf][3] * config.attribute_size);
		record->asked_fd = word_at(attributes + config.attribute[dmabuf][4] * config.attribute_size);
		record->present = word_at(bundle + config.present);
		return;
	}
	/* struct ib_uverbs_reg_mr, include/uapi/rdma/ib_user_verbs.h: response, start, length, hca_va, pd_handle, access. */
	record->asked_fd = ~0ULL;
	command = word_at(bundle + config.command);
	if (bpf_probe_read_user(&record->asked_start, 24, (const void *)(command + 8)) ||
	    bpf_probe_read_user(&access, sizeof(access), (const void *)(command + 36)))
		return;
	record->asked_access = access;
	record->present = ALL;
}

/* Where a request ends: tell if it failed. */
static __always_inline void end_request(const struct at *at)
{
	struct record_request *record;
	struct request *request;
	u64 bundle = 0;

	if (!(s32)at->ret)
		return;
	if (!NEW(record, at))
		return;
	record->ret = at->ret;
	record->since = record->calls = record->pages = 0;
	request = request_of_thread();
	if (request) {
		record->since = request->since;
		record->calls = request->calls;
		record->pages = request->pages;
		bundle = request->bundle;
	}
	if (at->trampoline)
		bundle = parameter(at, 0);
	record->uid = (u32)bpf_get_current_uid_gid();
	bpf_get_current_comm(record->comm, sizeof(record->comm));
	tell_task(record);
	tell_asked(record, bundle, at->cookie);
	bpf_ringbuf_submit(record, 0);
}

static __always_inline void opened(const struct at *at)
{
	struct record_0 *record;

	if (!(s32)at->ret && NEW(record, at))
		bpf_ringbuf_submit(record, 0);
}

/* Where a pin in a request ends: count it, and tell if it failed. */
static __always_inline void pin(const struct at *at)
{
	struct request *request = request_of_thread();
	struct record_pin *record;
	s32 ret = at->ret;

	if (!request)
		return;
	request->calls++;
	if (ret >= 0) {
		request->pages += ret;
		return;
	}
	if (!NEW(record, at))
		return;
	record->word[0] = at->ret;
	record->word[1] = parameter(at, 0);
	record->word[2] = (u32)parameter(at, 1);
	record->word[3] = (u32)parameter(at, 2);
	bpf_ringbuf_submit(record, 0);
}

static __always_inline void tell_return(const struct at *at)
{
	struct record_1 *record;

	if (!NEW(record, at))
		return;
	record->word[0] = at->ret;
	bpf_ringbuf_submit(record, 0);
}

/* Where another function ends: tell if it failed in a request. */
static __always_inline void failed(const struct at *at)
{
	s32 ret = at->ret;

	if (at->cookie & POINTER ? !is_error(at->ret) : ret >= 0)
		return;
	if (ret == -EAGAIN && at->cookie & NOT_EAGAIN)
		return;
	if (request_of_thread())
		tell_return(at);
}

static __always_inline __u16 highest_bit(u64 length)
{
	__u16 bit = 0;

	if (!length)
		return NO_SIZE;
#pragma unroll
	for (int shift = 32; shift; shift >>= 1)
		if (length >> shift) {
			length >>= shift;
			bit += shift;
		}
	return bit;
}

/* Where a driver's registration ends: count it if it succeeded, tell if it failed. */
static __always_inline void registered(const struct at *at)
{
	struct count_key key = { .driver = at->cookie >> DRIVER_SHIFT, .process = process() };
	struct size_key size = { .driver = key.driver };
	struct request *request;
	u64 length, *count, none[2] = {};

	if (is_error(at->ret)) {
		if (request_of_thread())
			tell_return(at);
		return;
	}
	if (!at->trampoline && !at->kept)
		return;
	length = parameter(at, 2);
	request = request_of_thread();
	if (at->cookie & DMABUF)
		key.path = DMA_BUF;
	else
		key.path = request && request->calls ? HOST : PEER_OR_ON_DEMAND;
	bpf_get_current_comm(key.comm, sizeof(key.comm));
	count = bpf_map_lookup_elem(&counts, &key);
	if (!count) {
		bpf_map_update_elem(&counts, &key, none, BPF_NOEXIST);
		count = bpf_map_lookup_elem(&counts, &key);
	}
	if (count) {
		__sync_fetch_and_add(&count[0], 1);
		__sync_fetch_and_add(&count[1], length);
	} else {
		__sync_fetch_and_add(&uncounted, 1);
	}
	size.path = key.path;
	size.power = highest_bit(length);
	count = bpf_map_lookup_elem(&sizes, &size);
	if (!count) {
		bpf_map_update_elem(&sizes, &size, none, BPF_NOEXIST);
		count = bpf_map_lookup_elem(&sizes, &size);
	}
	if (count)
		__sync_fetch_and_add(count, 1);
	else
		__sync_fetch_and_add(&uncounted, 1);
}

/* A page that was left behind: address, refcount, mapcount, pincount (in a large folio's following pages), flags. */
static __always_inline void tell_page(u64 *word, struct page *page)
{
	word[0] = (u64)page;
	word[1] = (u32)BPF_CORE_READ(page, _refcount.counter);
	word[2] = (u32)BPF_CORE_READ(page, _mapcount.counter);
	if (bpf_core_field_exists(struct folio, _pincount))
		word[3] = (u32)BPF_CORE_READ((struct folio *)page, _pincount.counter);
	else
		word[3] = word[1];
	if (bpf_core_field_exists(struct page___memdesc, flags.f))
		word[4] = BPF_CORE_READ((struct page___memdesc *)page, flags.f);
	else
		word[4] = BPF_CORE_READ(page, flags);
}

/*
 * Where migrate_pages ends: tell if pages stayed, and of some of them what they are. After a failure they are on the
 * list that was given (mm/migrate.c). Compaction fails to move pages all day long: of pins only.
 */
static __always_inline void migration(const struct at *at)
{
	struct record_migration *record;
	u64 head, next, offset;
	u32 reason;

	if (!(s32)at->ret || !request_of_thread())
		return;
	if (!at->trampoline && !at->kept)
		return;
	reason = parameter(at, 5);
	if (config.reasons[0] != ~0U && reason != config.reasons[0] && reason != config.reasons[1])
		return;
	if (!NEW(record, at))
		return;
	__builtin_memset(record->word, 0, sizeof(record->word));
	record->word[0] = at->ret;
	record->word[1] = reason;
	head = next = parameter(at, 0);
	offset = bpf_core_field_exists(struct page, lru) ? bpf_core_field_offset(struct page, lru) :
							   bpf_core_field_offset(struct folio, lru);
	if (head && (s32)at->ret > 0) {
#pragma unroll
		for (int index = 0; index < STUCK_PAGES; index++) {
			next = word_at(next);
			if (!next || next == head)
				break;
			tell_page(record->word + 2 + 5 * index, (struct page *)(next - offset));
		}
	}
	bpf_ringbuf_submit(record, 0);
}

/* Where a pin ends: tell if it succeeded without FOLL_LONGTERM, with the first of the pages that it pinned. */
static __always_inline void short_term_pin(const struct at *at)
{
	int first = at->cookie & BEHIND_MM ? 1 : 0;
	struct record_short_term_pin *record;
	u32 key = process(), flags;
	u64 array, some = 1;

	if ((s64)at->ret <= 0 || (!at->trampoline && !at->kept))
		return;
	flags = first ? parameter(at, 3) : parameter(at, 2);
	if (flags & config.longterm)
		return;
	if (!NEW(record, at))
		return;
	__builtin_memset(record->word, 0, sizeof(record->word));
	record->word[0] = first ? parameter(at, 1) : parameter(at, 0);
	record->word[1] = first ? parameter(at, 2) : parameter(at, 1);
	record->word[2] = flags;
	array = first ? parameter(at, 4) : parameter(at, 3);
	record->word[3] = word_at(array); /* what was pinned, wherever it is mapped by now */
	record->word[4] = bpf_get_stack(at->ctx, record->word + 5, 8 * STACK_FRAMES, 0);
	if (config.follow_unpins)
		bpf_map_update_elem(&pinners, &key, &some, BPF_ANY);
	bpf_ringbuf_submit(record, 0);
}

/* Where pages are unpinned: tell of the first, if this process made a short-term pin. */
static __always_inline void unpin(const struct at *at)
{
	struct record_1 *record;
	u32 key = process();
	u64 page;

	if (!bpf_map_lookup_elem(&pinners, &key))
		return;
	page = parameter(at, 0);
	if (!NEW(record, at))
		return;
	record->word[0] = at->cookie & ARRAY ? word_at(page) : page;
	bpf_ringbuf_submit(record, 0);
}

/* At the entry of a function that is followed by kprobes: keep its parameters until it returns. */
static __always_inline void keep(const struct at *at)
{
	struct call_key key = { .thread = thread(), .number = (u32)at->cookie };
	struct request *request = request_of_thread();
	struct call call = { .depth = 1 }, *before;

	if (!request && !(at->cookie & ALWAYS))
		return;
	if (request)
		call.since = request->since;
	before = bpf_map_lookup_elem(&calls, &key);
	if (before && before->since == call.since && before->depth && !(at->cookie & ALWAYS)) {
		before->depth++; /* migrate_pages: compaction within it, when its target is to be allocated */
		return;
	}
#pragma unroll
	for (int position = 0; position < PARAMETERS; position++)
		call.parameters[position] = register_of(at->registers, position);
	bpf_map_update_elem(&calls, &key, &call, BPF_ANY);
}

/* The parameters of the call that returns; NULL where they were not kept, or where it is not the outermost. */
static __always_inline struct call *kept(u64 cookie)
{
	struct call_key key = { .thread = thread(), .number = (u32)cookie };
	struct call *call = bpf_map_lookup_elem(&calls, &key);

	if (!call || !call->depth)
		return NULL;
	return --call->depth ? NULL : call;
}

#define AT_ENTRY(name)                                                                                           \
	SEC("fentry") int fentry_##name(void *ctx)                                                                \
	{                                                                                                        \
		struct at at = { .ctx = ctx, .cookie = bpf_get_attach_cookie(ctx), .trampoline = true };         \
                                                                                                                 \
		name(&at);                                                                                       \
		return 0;                                                                                        \
	}                                                                                                        \
	SEC("kprobe") int kprobe_##name(struct pt_regs *ctx)                                                      \
	{                                                                                                        \
		struct at at = { .ctx = ctx, .cookie = bpf_get_attach_cookie(ctx), .registers = ctx };           \
                                                                                                                 \
		name(&at);                                                                                       \
		return 0;                                                                                        \
	}

#define AT_RETURN(name, with_parameters)                                                                         \
	SEC("fexit") int fexit_##name(void *ctx)                                                                  \
	{                                                                                                        \
		struct at at = { .ctx = ctx, .cookie = bpf_get_attach_cookie(ctx), .trampoline = true };         \
                                                                                                                 \
		bpf_get_func_ret(ctx, &at.ret);                                                                  \
		name(&at);                                                                                       \
		return 0;                                                                                        \
	}                                                                                                        \
	SEC("kretprobe") int kretprobe_##name(struct pt_regs *ctx)                                                \
	{                                                                                                        \
		struct at at = { .ctx = ctx, .cookie = bpf_get_attach_cookie(ctx), .ret = returned_in(ctx) };    \
                                                                                                                 \
		if (with_parameters)                                                                             \
			at.kept = kept(at.cookie);                                                               \
		name(&at);                                                                                       \
		return 0;                                                                                        \
	}

AT_ENTRY(begin_request)
AT_ENTRY(unpin)
AT_RETURN(end_request, false)
AT_RETURN(opened, false)
AT_RETURN(pin, true)
AT_RETURN(failed, false)
AT_RETURN(registered, true)
AT_RETURN(migration, true)
AT_RETURN(short_term_pin, true)

SEC("kprobe") int kprobe_keep(struct pt_regs *ctx)
{
	struct at at = { .ctx = ctx, .cookie = bpf_get_attach_cookie(ctx), .registers = ctx };

	keep(&at);
	return 0;
}

/* Where a verb of libibverbs returns: tell if it gave NULL, of verbs that call one another the inner. */
SEC("kretprobe") int library_return(struct pt_regs *ctx)
{
	u64 cookie = bpf_get_attach_cookie(ctx);
	/* One key for all verbs: the inner takes the outer's parameters away. */
	struct call *call = kept(0xffffffff);
	struct record_library *record;

	if (!call || returned_in(ctx))
		return 0;
	record = new_record(sizeof(*record), cookie);
	if (!record)
		return 0;
	__builtin_memcpy(record->word, call->parameters, sizeof(record->word));
	bpf_ringbuf_submit(record, 0);
	return 0;
}

SEC("kprobe") int library_entry(struct pt_regs *ctx)
{
	struct at at = { .ctx = ctx, .cookie = 0xffffffff | ALWAYS, .registers = ctx };

	keep(&at);
	return 0;
}
