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
	CHECK(rr_equal(area, area, 64 * page) == 1);
	CHECK(rr_equal(area, area + page, page) == 0);
	rr_copy(area, area + page, page);
	CHECK(rr_equal(area, area + page, page) == 1);

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
	CHECK(rr_equal(transfer.source, transfer.target, 100000));
	transfer.gid_index = 9;
	CHECK(rr_loopback(pd, &transfer, why, sizeof(why)) == -EINVAL && *why);
	transfer.port = 7;
	CHECK(rr_loopback(pd, &transfer, why, sizeof(why)) == -EINVAL && *why);
	CHECK(rr_pd_dealloc(pd) == 0);
	CHECK(rr_device_close(device) == 0);
	rr_verbs_unload(verbs);
	free(bytes);
}

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

static void exercise_bpf(size_t page)
{
	uint8_t *ring = malloc(page + (size_t)2 * BPF_RING);

	if (!ring)
		abort();
	exercise_bpf_garbage(ring, page);
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
