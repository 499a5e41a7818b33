// SPDX-License-Identifier: Apache-2.0
/*
 * Exercises the C core under the address and undefined-behaviour sanitizers: exercise_core FAKE_VERBS_LIBRARY.
 * Prints "not ok" with the line for what is wrong, "skip" with the errno for what this machine does not allow;
 * exit code 0 if nothing was wrong.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "bpf.h"
#include "iouring.h"
#include "memory.h"
#include "pin.h"
#include "uprobe.h"
#include "verbs.h"

#include <errno.h>
#include <linux/perf_event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;

#define CHECK(condition)                                                     \
	do {                                                                 \
		if (!(condition)) {                                          \
			printf("not ok %d: %s\n", __LINE__, #condition);     \
			failures++;                                          \
		}                                                            \
	} while (0)

static uintptr_t map(size_t length)
{
	uintptr_t address = 0;

	CHECK(rr_map(length, 0, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0, &address) == 0);
	return address;
}

static void exercise_memory(size_t page)
{
	uint64_t sources[8];
	uintptr_t area, target, aligned;
	size_t moved, index;
	uint64_t sum;
	int fd;

	CHECK(rr_map(0, 0, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0, &area) == -EINVAL && !area);
	CHECK(rr_map(SIZE_MAX, 0, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0, &area) == -EINVAL);
	CHECK(rr_map(page, 3 * page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0, &area) == -EINVAL);
	CHECK(rr_map(5 * page + 1, (size_t)2 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0,
		     &aligned) == 0);
	CHECK(aligned % ((size_t)2 << 20) == 0);
	CHECK(rr_unmap(aligned, 5 * page + 1) == 0);

	area = map(64 * page);
	CHECK(rr_populate(area, 64 * page, 1) == 0);
	CHECK(rr_populate(area, 64 * page, 3) == 0);
	CHECK(rr_populate(area, 64 * page, 1000) == 0);
	CHECK(rr_populate(area + 5, 1, 0) == 0);
	CHECK(rr_populate(area, 0, 4) == 0);
	CHECK(rr_populate(UINTPTR_MAX - 4, 100, 1) == -EINVAL);
	rr_fill(area, 64 * page, 7);
	sum = rr_checksum(area, 64 * page);
	CHECK(rr_populate_by_touch(area, 64 * page, 2) == 0);
	CHECK(rr_checksum(area, 64 * page) == sum);
	CHECK(rr_checksum(area + 1, 13) != rr_checksum(area + 1, 12));
	rr_fill(area + 3, 29, 9);
	CHECK(rr_checksum(area, 64 * page) != sum);
	CHECK(rr_checksum(area, page) != rr_checksum(area + page, page));
	rr_copy(area, area + page, page);
	CHECK(rr_checksum(area, page) == rr_checksum(area + page, page));

	CHECK(rr_map(8 * page, 0, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0, &target) == 0);
	CHECK(rr_populate(target, page, 1) == -EFAULT || rr_populate(target, page, 1) == -ENOMEM);
	CHECK(rr_populate_by_touch(target, page, 1) == -EFAULT);
	for (index = 0; index < 8; index++)
		sources[index] = area + (index < 4 ? 2 * index : 10 + index) * page;
	sum = rr_checksum(area + 14 * page, 4 * page);
	CHECK(rr_gather(sources, 8, target, &moved) == 0 && moved == 8);
	CHECK(rr_checksum(target + 4 * page, 4 * page) == sum);
	sources[2] = 1;
	CHECK(rr_gather(sources, 8, target, &moved) < 0 && moved == 2);
	CHECK(rr_gather(sources, 8, target + 1, &moved) == -EINVAL && moved == 0);
	CHECK(rr_gather(sources, 0, target, &moved) == 0 && moved == 0);
	CHECK(rr_unmap(target, 8 * page) == 0);
	CHECK(rr_unmap(area, 64 * page) == 0);

	fd = rr_shm_unlinked("/regrepro-exercise");
	CHECK(fd >= 0);
	if (fd >= 0)
		close(fd);
	CHECK(rr_shm_unlinked("/no/such") < 0);
}

typedef int take(uintptr_t address, size_t length, struct rr_pin **pin, const char **step);

static void exercise_pin(const char *name, take *take_pin, size_t page, size_t pages)
{
	uintptr_t area = map(pages * page);
	struct rr_pin *pin;
	const char *step;
	uint64_t sum;
	pid_t child;
	int status;
	int ret;

	rr_fill(area, pages * page, 3);
	sum = rr_checksum(area, pages * page);
	CHECK(take_pin(area, 0, &pin, &step) == -EINVAL && !pin && step);
	CHECK(take_pin(UINTPTR_MAX - page, 2 * page, &pin, &step) == -EINVAL && !pin);
	ret = take_pin(area + 1, pages * page - 1, &pin, &step);
	if (ret) {
		printf("skip %s of %zu pages: %s: %s\n", name, pages, step, strerror(-ret));
		CHECK(ret == -EPERM || ret == -ENOSYS || ret == -ENOMEM);
		rr_unmap(area, pages * page);
		return;
	}
	CHECK(rr_pin_alive(pin) == 1);
	CHECK(rr_pin_threads(pin) >= 1 && rr_pin_thread_id(pin, 0) > 0);
	CHECK(rr_pin_thread_id(pin, 1u << 20) == 0);
	CHECK(rr_pin_thread_result(pin, 0) == 1);
	fflush(stdout);
	child = fork();
	if (child == 0) {
		int wrong = rr_pin_alive(pin) != 0 || rr_pin_release(pin) != 0;

		_exit(wrong);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(rr_pin_alive(pin) == 1);
	CHECK(rr_pin_release(pin) == 0);
	CHECK(rr_pin_release(pin) == 0);
	CHECK(rr_pin_alive(pin) == 0);
	CHECK(rr_pin_thread_result(pin, 0) <= 0);
	CHECK(rr_checksum(area, pages * page) == sum);
	rr_pin_destroy(pin);
	ret = take_pin(area, pages * page, &pin, &step);
	CHECK(ret == 0);
	if (!ret)
		rr_pin_destroy(pin); /* while it is held */
	CHECK(rr_checksum(area, pages * page) == sum);
	CHECK(rr_unmap(area, pages * page) == 0);
	CHECK(take_pin(area, pages * page, &pin, &step) < 0 && !pin);
}

static void exercise_ring(size_t page)
{
	uintptr_t area = map(4 * page);
	int ring = rr_ring_open();
	int ret;

	if (ring < 0) {
		printf("skip io_uring: %s\n", strerror(-ring));
		rr_unmap(area, 4 * page);
		return;
	}
	CHECK(rr_ring_registered(ring) == 0);
	ret = rr_ring_register(ring, area, 4 * page);
	CHECK(ret == 0 || ret == -ENOMEM);
	if (!ret) {
		CHECK(rr_ring_registered(ring) == 1);
		CHECK(rr_ring_register(ring, area, page) == -EBUSY);
		CHECK(rr_ring_unregister(ring) == 0);
	}
	CHECK(rr_ring_registered(ring) == 0);
	CHECK(rr_ring_unregister(ring) < 0);
	CHECK(rr_ring_register(ring, area, 0) < 0);
	CHECK(rr_ring_register(ring, area, (size_t)3 << 30) < 0);
	CHECK(rr_ring_register(ring, area, SIZE_MAX) < 0);
	close(ring);
	CHECK(rr_ring_registered(ring) < 0);
	rr_unmap(area, 4 * page);
}

static void exercise_verbs(const char *library)
{
	struct rr_transfer transfer = { .port = 1, .gid_index = 1, .timeout_ms = 1000 };
	struct rr_device_attributes attributes;
	struct rr_port_attributes port;
	struct rr_device *device;
	struct rr_verbs *verbs;
	struct rr_pd *pd;
	struct rr_mr *mr;
	char why[64];
	char names[16];
	char *bytes = malloc(200000);
	int ret;

	CHECK(rr_verbs_load("no-such-library.so", &verbs, why, sizeof(why)) == -ENOENT && !verbs && *why);
	CHECK(rr_verbs_load("libm.so.6", &verbs, why, sizeof(why)) == -ENOSYS && !verbs && *why);
	ret = rr_verbs_load(library, &verbs, why, sizeof(why));
	CHECK(ret == 0);
	if (ret) {
		printf("# %s\n", why);
		free(bytes);
		return;
	}
	CHECK(rr_verbs_devices(verbs, names, sizeof(names)) == 1 && !strcmp(names, "fake0"));
	CHECK(rr_verbs_devices(verbs, names, 3) == -ERANGE);
	CHECK(rr_device_open(verbs, "other0", &device) == -ENODEV && !device);
	CHECK(rr_device_open(verbs, "fake0", &device) == 0);
	CHECK(rr_device_query(device, &attributes) == 0 && attributes.max_mr == 42);
	CHECK(rr_port_query(device, 2, &port) == -EINVAL);
	CHECK(rr_port_query(device, 1, &port) == 0 && port.max_msg_size == 1 << 16);
	CHECK(rr_pd_alloc(device, &pd) == 0);
	CHECK(rr_reg_mr_iova2(pd, 0x1000, SIZE_MAX, UINT64_MAX, 1u << 20, &mr) == 0 && mr->lkey == 0x1234);
	CHECK(rr_dereg_mr(pd, mr) == 0);
	CHECK(rr_reg_mr(pd, 0, 0, -1, &mr) == 0);
	CHECK(rr_dereg_mr(pd, mr) == 0);
	CHECK(rr_reg_dmabuf_mr(pd, 1, 2, 3, -1, 1, &mr) == 0);
	CHECK(rr_pd_dealloc(pd) == -EBUSY);
	CHECK(rr_dereg_mr(pd, mr) == 0);
	CHECK(rr_reg_mr_loop(pd, 0x1000, 4096, 1, 10) == 0);
	rr_fill((uintptr_t)bytes, 200000, 1);
	transfer.source = (uintptr_t)bytes;
	transfer.target = (uintptr_t)bytes + 100000;
	transfer.length = 100000;
	CHECK(rr_loopback(pd, &transfer, why, sizeof(why)) == 0);
	CHECK(!memcmp((void *)transfer.source, (void *)transfer.target, 100000));
	transfer.gid_index = 9;
	CHECK(rr_loopback(pd, &transfer, why, sizeof(why)) == -EINVAL && *why);
	transfer.port = 7;
	CHECK(rr_loopback(pd, &transfer, why, sizeof(why)) == -EINVAL && *why);
	CHECK(rr_pd_dealloc(pd) == 0);
	CHECK(rr_device_close(device) == 0);
	rr_verbs_unload(verbs);
	free(bytes);
}

#define RING_PAGES 2

/* Random words in a ring, and in the positions: nothing outside of it is read, and it ends. */
static void exercise_uprobe_garbage(uint8_t *ring, size_t page, struct rr_uprobe_hit *hits, size_t room,
				    uint8_t *stacks)
{
	struct perf_event_mmap_page *control = (struct perf_event_mmap_page *)ring;
	struct rr_uprobe_tally tally = { 0 };
	size_t index, found = 0, round, words = RING_PAGES * page / sizeof(uint64_t);
	uint64_t *data = (uint64_t *)(ring + page);

	srand(5);
	for (round = 0; round < 3000; round++) {
		for (index = 0; index < words; index++) {
			/* Headers of all kinds, small lengths, the ABI's 2, sent numbers, now and then anything. */
			uint64_t size = 8 * ((uint64_t)rand() % (rr_uprobe_record_bytes(0) / 8 + 20));
			uint64_t some[] = { size << 48 | PERF_RECORD_SAMPLE, 2, size, size << 48 | (rand() % 20),
					    (uint64_t)rand() << 32 | 4, (uint64_t)rand() << 33 | rand() };

			data[index] = some[rand() % 64 ? rand() % 5 : 5];
		}
		control->data_tail = 8 * (uint64_t)rand() + (round % 50 ? 0 : rand() % 8);
		control->data_head = control->data_tail + 8 * (uint64_t)(rand() % (words + words / 8));
		if (round % 51 == 0)
			control->data_head = rand();
		while ((index = rr_uprobe_drain((uintptr_t)ring, RING_PAGES, hits, room, stacks, &tally)) == room)
			found += index;
		found += index;
		CHECK(control->data_tail == control->data_head);
	}
	CHECK(found && tally.unreadable && tally.foreign && tally.throttled);
}

/* On a machine and for a user that may: nothing runs, everything is opened and closed. */
static void exercise_uprobe_events(void)
{
	static const struct rr_uprobe_zero every, bad[] = { { 0, 0, 2 }, { 32, 0, 8 }, { -1, 8, 16 } };
	uintptr_t address, count;
	unsigned int type = 0;
	uint32_t key = 0;
	size_t index;
	char log[4096] = "x";
	FILE *file = fopen("/sys/bus/event_source/devices/uprobe/type", "r");
	int rings = rr_uprobe_rings_open(4), lost = rr_bpf_counter_open("test"), ring = rr_uprobe_ring_open(0, 256);
	int program = rr_uprobe_program(7, rings, lost, &every, log, sizeof(log)), event;

	CHECK(!*log);
	if (!file || fscanf(file, "%u", &type) != 1 || rings < 0 || lost < 0 || program < 0 || ring < 0) {
		printf("skip uprobes: maps %d %d, program %d, ring %d\n", rings, lost, program, ring);
	} else {
		CHECK(rr_bpf_answer() == -EINVAL);
		CHECK(rr_uprobe_ring_map(ring, 3, &address) == -EINVAL && !address);
		CHECK(rr_uprobe_ring_map(ring, 0, &address) == -EINVAL && !address);
		CHECK(rr_uprobe_ring_map(ring, RING_PAGES, &address) == 0 && address);
		CHECK(rr_uprobe_ring_runs(ring) == 1);
		CHECK(rr_bpf_map_set(rings, &key, &ring) == 0);
		key = 4;
		CHECK(rr_bpf_map_set(rings, &key, &ring) == -E2BIG);
		key = 0;
		CHECK(rr_bpf_map_unset(rings, &key) == 0);
		CHECK(rr_bpf_map_unset(rings, &key) == -ENOENT);
		CHECK(rr_bpf_counter_map(lost, &count) == 0 && count && rr_bpf_counter(count) == 0);
		CHECK(rr_bpf_counter_unmap(count) == 0);
		CHECK(rr_uprobe_open(type, 0, "/nonexistent", 0, 0) == -ENOENT);
		event = rr_uprobe_open(type, 0, "/proc/self/exe", 0, 0);
		CHECK(event >= 0);
		CHECK(rr_uprobe_start(event, -1) == -EBADF);
		CHECK(rr_uprobe_start(event, rings) == -EINVAL);
		CHECK(rr_uprobe_start(event, program) == 0);
		close(event);
		CHECK(rr_uprobe_ring_unmap(address, RING_PAGES) == 0);
		for (index = 0; index < sizeof(bad) / sizeof(bad[0]); index++)
			CHECK(rr_uprobe_program(7, rings, lost, &bad[index], log, sizeof(log)) == -EINVAL && !*log);
		for (index = 0; index < 4; index++) {
			const struct rr_uprobe_zero zero = { index & 1 ? 3 : -1, 16, index & 2 ? 8 : 4 };

			event = rr_uprobe_program(7, rings, lost, &zero, log, sizeof(log));
			CHECK(event >= 0 && !*log);
			close(event);
		}
		/* The maps the wrong way round: the verifier says what it does not like. */
		event = rr_uprobe_program(7, lost, rings, &every, log, sizeof(log));
		CHECK((event == -EINVAL || event == -EACCES) && strstr(log, "map"));
	}
	if (program >= 0)
		close(program);
	if (ring >= 0)
		close(ring);
	if (rings >= 0)
		close(rings);
	if (lost >= 0)
		close(lost);
	if (file)
		fclose(file);
	CHECK(rr_uprobe_ring_open(1 << 20, 0) < 0);
	CHECK(rr_uprobe_ring_map(-1, 1, &address) == -EBADF);
	CHECK(rr_uprobe_ring_runs(-1) == -EBADF);
	CHECK(rr_uprobe_start(-1, -1) == -EBADF);
	CHECK(rr_bpf_counter_map(-1, &count) == -EBADF && !count);
	CHECK(rr_bpf_map_set(-1, &key, &lost) < 0);
	CHECK(rr_uprobe_program(7, -1, -1, &every, log, sizeof(log)) < 0);
}

static void exercise_uprobe(size_t page)
{
	size_t room = RING_PAGES * page / rr_uprobe_record_bytes(0) + 1;
	struct rr_uprobe_hit *hits = malloc(room * sizeof(*hits));
	uint8_t *ring = malloc((RING_PAGES + 1) * page);
	uint8_t *stacks = malloc(RING_PAGES * page);

	CHECK(!rr_uprobe_register(64));
	if (!hits || !ring || !stacks)
		abort();
	memset(ring, 0, (RING_PAGES + 1) * page);
	exercise_uprobe_garbage(ring, page, hits, room, stacks);
	exercise_uprobe_garbage(ring, page, hits, 1, stacks);
	exercise_uprobe_events();
	free(hits);
	free(ring);
	free(stacks);
}

#define BPF_HASH 1 /* BPF_MAP_TYPE_HASH */
#define BPF_KPROBE 2 /* BPF_PROG_TYPE_KPROBE */
#define BPF_RING 256

/* Random heads in a ring, positions and rooms: nothing outside is read or written, and it goes on or says EBADMSG. */
static void exercise_bpf_garbage(uint8_t *ring, size_t page)
{
	unsigned long consumer = 0, *producer = (unsigned long *)ring;
	const struct rr_bpf_ring mapped = { (uintptr_t)&consumer, (uintptr_t)ring, BPF_RING };
	size_t index, round, found = 0, refused = 0, waited = 0;

	srand(7);
	for (round = 0; round < 20000; round++) {
		size_t room = (size_t)rand() % (2 * BPF_RING);
		unsigned long before;
		uint8_t *out = malloc(room + 1);
		int64_t used;

		if (!out)
			abort();
		for (index = 0; index < BPF_RING; index += sizeof(uint64_t)) {
			/* Small lengths, the two bits, now and then anything. */
			uint32_t length = (uint32_t)rand() % 48, bits = rand() % 4 ? 0 : (uint32_t)(rand() % 4) << 30;
			uint64_t head = (rand() % 16 ? length | bits : (uint32_t)rand() << 1) | (uint64_t)rand() << 32;

			memcpy(ring + page + index, &head, sizeof(head));
			memcpy(ring + page + BPF_RING + index, &head, sizeof(head));
		}
		consumer = 8 * (unsigned long)rand() - (round % 3 ? 0 : 1ul << 40);
		consumer += round % 50 ? 0 : (unsigned long)rand() % 8;
		*producer = consumer + 8 * ((unsigned long)rand() % (BPF_RING / 8 + 2));
		if (round % 51 == 0)
			*producer = (unsigned long)rand();
		before = consumer;
		used = rr_bpf_ring_take(&mapped, out, room);
		CHECK(used >= 0 ? (size_t)used <= room && used % 8 == 0 : used == -EBADMSG);
		CHECK(before == consumer || consumer - before <= BPF_RING);
		CHECK(before == consumer || *producer - consumer <= BPF_RING);
		CHECK(rr_bpf_ring_empty(&mapped) == (consumer == *producer));
		found += used > 0;
		refused += used < 0;
		waited += used == 0 && consumer != *producer;
		free(out);
	}
	CHECK(found && refused && waited);
}

/* On a machine and for a user that may. */
static void exercise_bpf_live(size_t page)
{
	static const uint8_t insns[2][8] = { { 0xb7 }, { 0x95 } }; /* r0 = 0; exit */
	static const char name[] = "a_name_that_is_too_long";
	struct rr_bpf_program program = { .name = name, .type = BPF_KPROBE, .insns = insns[0], .count = 2 };
	int hash = rr_bpf_map(BPF_HASH, sizeof(uint64_t), sizeof(uint64_t), 4, 0, name);
	int ring = rr_bpf_ring_open((uint32_t)page), loaded;
	uint64_t key, next, value, seen = 0;
	struct rr_bpf_ring mapped;
	char log[4096] = "x";
	uint8_t out[64];

	loaded = rr_bpf_load(&program, log, sizeof(log));
	CHECK(!*log);
	if (hash < 0 || ring < 0 || loaded < 0) {
		printf("skip bpf: map %d, ring %d, program %d\n", hash, ring, loaded);
	} else {
		CHECK(rr_bpf_map_next(hash, NULL, &next) == -ENOENT);
		for (key = 1; key <= 4; key++) {
			value = 10 * key;
			CHECK(rr_bpf_map_get(hash, &key, &next) == -ENOENT);
			CHECK(rr_bpf_map_set(hash, &key, &value) == 0);
			CHECK(rr_bpf_map_get(hash, &key, &next) == 0 && next == value);
		}
		CHECK(rr_bpf_map_set(hash, &key, &value) == -E2BIG);
		for (key = 0; !rr_bpf_map_next(hash, key ? &key : NULL, &next); key = next)
			seen |= 1u << next;
		CHECK(seen == 0x1e);
		key = 3;
		CHECK(rr_bpf_map_unset(hash, &key) == 0 && rr_bpf_map_unset(hash, &key) == -ENOENT);
		CHECK(rr_bpf_map_get(hash, &key, &value) == -ENOENT);
		CHECK(rr_bpf_map_next(hash, &key, &next) == 0 && next != 3);
		CHECK(rr_bpf_ring_map(ring, (uint32_t)page + 8, &mapped) == -EINVAL && !mapped.producer);
		CHECK(rr_bpf_ring_map(ring, 0, &mapped) == -EINVAL && !mapped.consumer);
		CHECK(rr_bpf_ring_map(ring, (uint32_t)page, &mapped) == 0 && mapped.bytes == page);
		CHECK(rr_bpf_ring_take(&mapped, out, sizeof(out)) == 0 && rr_bpf_ring_empty(&mapped) == 1);
		CHECK(rr_bpf_ring_unmap(&mapped) == 0 && !mapped.producer && !mapped.bytes);
		CHECK(rr_bpf_attach(loaded) < 0);
		program.count = 1; /* it runs off its end */
		CHECK(rr_bpf_load(&program, log, sizeof(log)) == -EINVAL && *log);
		CHECK(rr_bpf_btf("no_such_module") < 0);
	}
	if (hash >= 0)
		close(hash);
	if (ring >= 0)
		close(ring);
	if (loaded >= 0)
		close(loaded);
	CHECK(rr_bpf_ring_open((uint32_t)page + 8) < 0);
	CHECK(rr_bpf_ring_map(-1, (uint32_t)page, &mapped) == -EBADF && !mapped.producer && !mapped.consumer);
	CHECK(rr_bpf_map_get(-1, &key, &value) < 0 && rr_bpf_map_next(-1, NULL, &next) < 0);
	CHECK(rr_bpf_attach(-1) < 0);
}

static void exercise_bpf(size_t page)
{
	uint8_t *ring = malloc(page + (size_t)2 * BPF_RING);

	if (!ring)
		abort();
	exercise_bpf_garbage(ring, page);
	exercise_bpf_live(page);
	free(ring);
}

int main(int count, char **arguments)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	size_t lengths[] = { 1, 3, 2 * page / sizeof(void *) + 1 };
	size_t index;

	setvbuf(stdout, NULL, _IONBF, 0);
	exercise_memory(page);
	exercise_ring(page);
	exercise_bpf(page);
	if (rr_uprobe_register(0))
		exercise_uprobe(page);
	else
		printf("skip uprobes: the registers of this architecture are not known\n");
	for (index = 0; index < sizeof(lengths) / sizeof(lengths[0]); index++) {
		exercise_pin("process-vm", rr_pin_process_vm, page, lengths[index]);
		exercise_pin("vmsplice", rr_pin_vmsplice, page, lengths[index]);
		exercise_pin("io-uring", rr_pin_io_uring, page, lengths[index]);
	}
	if (count > 1)
		exercise_verbs(arguments[1]);
	printf(failures ? "# %d wrong\n" : "# all right\n", failures);
	return failures != 0;
}
